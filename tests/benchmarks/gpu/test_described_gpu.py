"""XLA's CUDA platform takes our custom call, and compiles a fragment with it for a described GPU."""

import gc
import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks.gpu import ahead
from mpmd.compile.backends.jax_function import jax_function
from mpmd.compile.backends.native_gpu.backend import NativeGpuBackend
from mpmd.compile.driver import compiled_or_kept
from tests.support.native_fragments import fragment_of
from tests.support.simulated_gpu import StandInGpu

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unpoisoned"),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins") is None, reason="JAX's CUDA plugin is not installed"
    ),
]


class DescribedGpu(StandInGpu):
    """Its handlers are registered with XLA's CUDA platform, which never calls them here."""

    platform = "CUDA"

    def entry(self, handler):
        return handler


def test_a_fragment_is_one_call_of_ours():
    if why := ahead.why_not():
        pytest.skip(why)
    mesh, gpu = Mesh(np.array(ahead.devices()[:1]), ("x",)), DescribedGpu()
    backend = NativeGpuBackend.of(mesh, libraries=gpu)
    fragment = fragment_of(lambda x, w: (jnp.dot(x @ w, w), x), X, X, donated=(0,))
    made, _ = compiled_or_kept(fragment, backend.target, backend.options)
    program = backend.register(made, "mesh", mesh)
    text = jax_function(fragment, mesh, program, made.aliases, large=False).as_text()
    assert text.count('custom_call_target="mpmd_native"') == 1 and "fusion(" not in text
    assert "output_to_operand_aliasing={{1}: (0, {})}" in text  # the donated argument is updated in place
    assert f"u8[{program.arena_bytes}]" in text and gpu.live["descriptor"] == 1
    gc.collect()
    assert not gpu.broken
