"""Fragments that XLA compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mpmd.compile.backends.inlined import INLINE_BELOW_FLOPS
from mpmd.compile.backends.xla.backend import XlaBackend
from tests.support.native_fragments import fragment_of


@pytest.mark.parametrize("rows", [8, 1024])
def test_a_program_that_only_writes_much_is_dispatched_to_another_thread(rows):
    """XLA counts no operations in it; a short one runs in the thread that issues."""

    def start(batch, count):
        return batch[:2], jnp.full((rows, 1024), jnp.inf), count

    batch, count = np.arange(12, dtype=np.int32).reshape(4, 3), np.float32(-0.0)
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    made = XlaBackend().compile(fragment_of(start, batch, count), mesh)
    assert (made.cost_analysis().get("flops", 0) >= INLINE_BELOW_FLOPS) == (rows == 1024)
    for got, want in zip(made(batch, count), start(batch, count), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
