"""All fragments of the models: their memory as two checkers see it, and their numbers with poison in it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from examples.workloads.flax_models import FLAX_MODELS
from examples.workloads.models import MODELS
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from mpmd.compile.backends.jax_function import numpy_dtype
from mpmd.compile.lowering import lower
from tests.support.hlo_meaning import evaluate
from tests.support.native_fragments import check_memory, compiled, run

ALL = MODELS | FLAX_MODELS
QUICK = ("scanned_layers",)


def fragments_of(name: str, stages: int = 2):
    """The distinct fragments of a training step of a model."""
    params, loss, batch = ALL[name].build(stages)
    init, update = sgd_momentum()
    step = pipelined(training_step(loss, 4, update), stages, donate_argnums=0)
    found = step.lower(init(params), *batch).fragments
    return list({f.fingerprint: f for f in found.values()}.values())


def arguments_of(fragment):
    rng = np.random.default_rng(0)
    made = []
    for spec in fragment.arguments:
        dtype = numpy_dtype(spec.dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            made.append(np.asarray(rng.standard_normal(spec.shape) * 0.3, np.float32).astype(dtype))
        else:
            made.append(rng.integers(0, 3, spec.shape).astype(dtype))
    return made


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_no_value_is_lost_and_none_is_read_after_its_end(name):
    for fragment in fragments_of(name):
        made = compiled(fragment, poison=True)
        check_memory(made)
        arguments = arguments_of(fragment)
        meant = evaluate(lower(fragment.text), arguments)
        meant = meant if isinstance(meant, (list, tuple)) else [meant]
        for mine, meaning in zip(run(fragment, arguments, made), meant, strict=True):
            half = mine.dtype in (jnp.bfloat16, np.float16)
            got, want = np.asarray(mine, np.float64), np.asarray(meaning, np.float64)
            scale = float(np.abs(want).max()) if want.size else 1.0
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=(5e-2 if half else 1e-4) * max(1.0, scale))
