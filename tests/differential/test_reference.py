"""`backend="reference"`: every model trains as with `jax.jit`, on the thunks and memory of native code."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from examples.workloads.models import MODELS
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from tests.support.comparing import check_training
from tests.support.sharded_models import MESHES, SHARDED_MODELS, STAGES, shardings

pytestmark = pytest.mark.usefixtures("plain_xla")

QUICK = ("scanned_layers", "custom_gradient")
QUICK_MESHES = {("mlp", "two and two")}


def check(jitted, step, state, batch, tolerance=1e-5):
    """Trains as with `jax.jit`, and all of it by the reference."""
    compiled = jitted.compiled(state, *batch)
    assert {e.backend for e in compiled.executables.values()} <= {"reference", "zeros"}
    assert compiled.cost_analysis()["fallbacks"] == 0
    check_training(jitted, jax.jit(step), state, batch, tolerance)
    jitted.clear_cache()


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_models_train_as_with_jit(name):
    model = MODELS[name]
    params, loss, batch = model.build(2)
    init, update = sgd_momentum()
    step = training_step(loss, 4, update)
    reference = pipelined(step, 2, donate_argnums=0, options={"backend": "reference"})
    check(reference, step, init(params), batch, model.tolerance)


SEVERAL = [(name, mesh) for name in SHARDED_MODELS for mesh in MESHES if mesh != "one device"]


@pytest.mark.parametrize(
    ("name", "mesh"), [pytest.param(*c, marks=[] if c in QUICK_MESHES else pytest.mark.slow) for c in SEVERAL]
)
def test_models_on_meshes_of_several_devices_train_as_with_jit(name, mesh):
    model, axes = SHARDED_MODELS[name](), MESHES[mesh]
    init, update = sgd_momentum()
    step = training_step(model.loss, 2, update)
    options = {**shardings(model, axes), "backend": "reference"}
    reference = pipelined(step, STAGES, mesh=axes, options=options, donate_argnums=0)
    check(reference, step, init(model.params), model.batch)


def one_stage(function, backend="reference", donate=()):
    config = mpmd.make_config(mpmd.make_topology({"m0": 1}), {"f": "m0"}, backend=backend)
    return mpmd.jit(lambda *a: mpmd.named_computation(function, name="f")(*a), config, donate_argnums=donate)


def test_it_runs_the_program_that_native_code_runs():
    x, w = np.ones((4, 8), np.float32), np.ones((8, 16), np.float32)

    def function(x, w):
        return jax.nn.softmax(jnp.tanh(x @ w))

    reference, native = (one_stage(function, backend).compiled(x, w) for backend in ("reference", "native"))
    for what in ("hlo", "buffers", "thunks", "kernels", "costs"):
        assert reference.as_text(what) == native.as_text(what) != ""
    assert "no text 'llvm'" in reference.as_text("llvm")
    assert reference.fragment_memory().keys() == native.fragment_memory().keys()


def test_donated_arguments_are_consumed():
    x, y = (jax.device_put(np.full((4, 8), value, np.float32)) for value in (1, 2))
    result = one_stage(lambda x, y: x + y, donate=0)(x, y)
    np.testing.assert_array_equal(result, np.full((4, 8), 3, np.float32))
    assert x.is_deleted() and not y.is_deleted()


def test_values_of_64_bits_stay():
    with jax.enable_x64(True):
        x = np.array([1 << 40, 3], np.int64)
        np.testing.assert_array_equal(one_stage(lambda x: x + 1)(x), x + 1)


def test_what_has_no_thunk_is_compiled_by_xla_with_a_warning():
    def eigenvalues(x):
        return jnp.linalg.eigvalsh(x)

    x = np.diag(np.arange(8, dtype=np.float32))
    with pytest.warns(UserWarning, match="on m0 is compiled by XLA as a whole:\n  .*lapack_ssyevd") as said:
        compiled = one_stage(eigenvalues).compiled(x)
    assert len(said) == 1 and compiled.cost_analysis()["fallbacks"] == 1
    np.testing.assert_allclose(compiled(x), np.arange(8), atol=1e-5)


def test_callbacks_are_left_to_xla():
    def printed(x):
        jax.debug.callback(lambda v: None, x[0])
        return x * 2

    with pytest.warns(UserWarning, match="reference fragments do not call back to Python"):
        one_stage(printed).compiled(np.ones(4, np.float32))


def test_kernels_from_files_have_no_meaning(tmp_path):
    options = mpmd.PipelineOptions(kernel_overrides=str(tmp_path))
    topology = mpmd.make_topology({"m0": 1})
    config = mpmd.make_config(topology, {"f": "m0"}, backend="reference", options=options)
    step = mpmd.jit(lambda x: mpmd.named_computation(jnp.tanh, name="f")(x), config)
    with pytest.warns(UserWarning, match="the reference has no kernels of LLVM"):
        step.compiled(np.ones(4, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_stage(jnp.tanh).compiled(np.ones(4, np.float32))
