"""Steps on meshes of several stand-in GPUs, native between collectives, equal `jax.jit`; `make test-gpu`."""

from __future__ import annotations

import warnings

import jax
import pytest
from jax.sharding import PartitionSpec as P

from examples.workloads.models import MODELS
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from mpmd.compile.backends import targets
from mpmd.compile.backends.native_gpu.backend import NativeGpuBackend
from tests.support.comparing import check_training
from tests.support.sharded_layers import CASES, two_layers
from tests.support.sharded_models import (
    EIGHT,
    MESHES,
    SHARDED_MODELS,
    STAGES,
    UNLIKE,
    pipelined_on,
    shardings,
)
from tests.support.simulated_gpu import StandInGpu

pytest.importorskip("triton", reason="Triton is not installed: make test-gpu")
pytestmark = pytest.mark.usefixtures("plain_xla")
SEVERAL = {name: axes for name, axes in {**MESHES, **EIGHT}.items() if name != "one device"}
QUICK = {("mlp", "two for tensors"), ("scanned", "two and two")}
STEPS = 2


@pytest.fixture
def gpu(monkeypatch):
    """Eight of them, in the place of the CPUs."""
    made = StandInGpu(count=8)
    monkeypatch.setitem(targets.NATIVE, "cpu", lambda m, options: NativeGpuBackend.of(m, options, made))
    with jax.default_matmul_precision("highest"):
        yield made


def check(jitted, step, state, batch, gpu):
    """Trains as with `jax.jit`; all of it but collectives is native, and nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = jitted.compiled(state, *batch)
    assert compiled.cost_analysis()["fallbacks"] == 0
    check_training(jitted, jax.jit(step), state, batch, steps=STEPS)
    assert gpu.launched and not gpu.broken
    jitted.clear_cache()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(n, m, marks=[] if (n, m) in QUICK else pytest.mark.slow)
        for n in SHARDED_MODELS
        for m in SEVERAL
    ],
)
def test_models_train_as_with_jit(name, mesh, gpu):
    model, axes = SHARDED_MODELS[name](), SEVERAL[mesh]
    init, update = sgd_momentum()
    step = training_step(model.loss, 2, update)
    options = {**shardings(model, axes), "backend": "native"}
    native = pipelined(step, STAGES, mesh=axes, options=options, donate_argnums=0)
    check(native, step, init(model.params), model.batch, gpu)


@pytest.mark.slow
@pytest.mark.parametrize("meshes", UNLIKE)
def test_models_on_meshes_that_are_not_alike_train_as_with_jit(meshes, gpu):
    model, axes = SHARDED_MODELS["mlp"](), UNLIKE[meshes]
    init, update = sgd_momentum()
    step = training_step(model.loss, 2, update)
    native = pipelined_on(step, axes, {**shardings(model, axes[0] | axes[1]), "backend": "native"})
    check(native, step, init(model.params), model.batch, gpu)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("one device")])
def test_shardings_inside_and_at_the_border_are_kept(case, gpu):
    mesh, options, constraint = CASES[case]
    params, loss, batch = two_layers(constraint)
    init, update = sgd_momentum()
    options = {**options, "backend": "native"}
    native = pipelined(training_step(loss, 2, update), 2, mesh=mesh, options=options, donate_argnums=0)
    check(native, training_step(two_layers()[1], 2, update), init(params), batch, gpu)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "shared_by_all", "scanned_layers", "dropout"])
def test_models_on_sharded_batches_train_as_with_jit(name, gpu):
    params, loss, batch = MODELS[name].build(2)
    init, update = sgd_momentum()
    step = training_step(loss, 2, update)
    options = {"in_shardings": (None, *(P("data") for _ in batch)), "backend": "native"}
    native = pipelined(step, 2, mesh={"data": 4}, options=options, donate_argnums=0)
    check(native, step, init(params), batch, gpu)
