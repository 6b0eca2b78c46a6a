"""Whole models as launches on a stand-in GPU: forward and backward equal to `jax.jit`; `make test-gpu`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.workloads.models import MODELS
from mpmd.compile.backends.native_gpu.launches import LaunchProgram
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.driver import prepare_fragment
from tests.support.gpu_launches import run_program
from tests.support.native_fragments import fragment_of

pytest.importorskip("triton", reason="Triton is not installed: make test-gpu")
STEP = 0.1


@pytest.mark.parametrize("name", MODELS)
def test_models_step_as_with_jit(name):
    """Loss, gradients and a step of gradient descent, parameters donated, on poisoned memory."""
    model = MODELS[name]
    params, loss, batch = model.build(2)
    leaves, tree = jax.tree.flatten(params)
    count, batch = len(leaves), [jnp.asarray(b) for b in batch]

    def step(*given):
        params = jax.tree.unflatten(tree, given[:count])
        value, gradients = jax.value_and_grad(loss)(params, *given[count:])
        return [p - STEP * g for p, g in zip(given, jax.tree.leaves(gradients))] + [value]

    arguments = [np.asarray(a) for a in (*leaves, *batch)]
    with jax.default_matmul_precision("highest"):  # by default products of f32 have 11 digits
        fragment = fragment_of(step, *arguments, donated=tuple(range(count)))
        wanted = jax.jit(step)(*arguments)
    program = prepare_fragment(fragment, GpuTarget()).program
    assert isinstance(program, LaunchProgram)
    for got, want in zip(run_program(program, fragment, arguments), wanted, strict=True):
        want = np.asarray(want, np.float32)
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=model.tolerance, atol=model.tolerance)
