"""The native backend trains every model as `jax.jit` does, and compiles all of their fragments itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from examples.workloads.flax_models import FLAX_MODELS
from examples.workloads.models import MODELS
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.errors import ConfigError
from mpmd.options import PipelineOptions
from tests.support.comparing import check_training
from tests.support.sharded_layers import CASES, two_layers
from tests.support.sharded_models import MESHES, SHARDED_MODELS, STAGES, UNLIKE, pipelined_on, shardings

pytestmark = pytest.mark.usefixtures("plain_xla")

ALL = MODELS | FLAX_MODELS
QUICK = ("uneven", "scanned_layers", "half_precision")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_models_train_as_with_jit(name):
    model = ALL[name]
    params, loss, batch = model.build(2)
    init, update = sgd_momentum()
    step = training_step(loss, 4, update)
    native = pipelined(step, 2, donate_argnums=0, options={"backend": "native"})
    compiled = native.compiled(init(params), *batch)
    assert {e.backend for e in compiled.executables.values()} <= {"native", "zeros"}
    assert compiled.cost_analysis()["fallbacks"] == 0
    check_training(native, jax.jit(step), init(params), batch, model.tolerance)
    native.clear_cache()


def one_stage(function, mesh=1, **options):
    topology = mpmd.make_topology({"m0": mesh})
    config = mpmd.make_config(topology, {"f": "m0"}, backend="native", **options)
    return mpmd.jit(lambda *a: mpmd.named_computation(function, name="f")(*a), config)


def test_the_texts_of_a_fragment(unpoisoned):
    x = np.ones((4, 8), np.float32)
    compiled = one_stage(jax.nn.softmax).compiled(x)
    assert "kind=kInput" in compiled.as_text("hlo")
    assert "allocation 0: parameter 0" in compiled.as_text("buffers")
    assert compiled.as_text("thunks").count("kernel ") == 1
    assert "reduce-maximum" in compiled.as_text("kernels")
    assert "define " in compiled.as_text("llvm")
    assert "stablehlo" in compiled.as_text("stablehlo")
    with pytest.raises(ConfigError, match="there is no text 'poem' of a step\n  there are .*'mpmd'.*'llvm'"):
        compiled.as_text("poem")


def test_costs_and_memory():
    x, w = np.ones((4, 8), np.float32), np.ones((8, 16), np.float32)
    compiled = one_stage(lambda x, w: jnp.tanh(x @ w)).compiled(x, w)
    assert compiled.cost_analysis()["flops"] >= 2 * 4 * 8 * 16
    (memory,) = compiled.fragment_memory().values()
    assert (memory.arguments, memory.results) == (x.nbytes + w.nbytes, 4 * 16 * 4)
    assert memory.code > 0


def test_the_programs_of_this_file_are_poisoned():
    w = np.eye(8, dtype=np.float32)
    compiled = one_stage(lambda x, w: jnp.sort(jnp.tanh(jnp.sort(x @ w)) @ w) @ w).compiled(w, w)
    assert "kernel poison." in compiled.as_text("thunks")


def test_what_native_code_cannot_do_is_compiled_by_xla_with_a_warning():
    def eigenvectors(x):
        return jax.lax.linalg.eigh(x, symmetrize_input=False)[0]

    x = np.diag(np.arange(8, dtype=np.float32))
    with pytest.warns(
        UserWarning, match=r"on m0 is compiled by XLA as a whole:\n  .*: no kernel calls lapack_"
    ) as said:
        compiled = one_stage(eigenvectors).compiled(x)
    assert len(said) == 1 and str(said[0].message).count("\n") == 1
    assert compiled.cost_analysis()["fallbacks"] == 1
    assert "cluster 0: XLA, the whole fragment\n  custom-call" in compiled.as_text("clusters")
    np.testing.assert_allclose(compiled(x), eigenvectors(x), rtol=1e-6)


def test_the_rest_of_a_fragment_stays_native():
    def spectrum(x, w):
        values = jnp.linalg.eigvalsh(jnp.tanh(x @ w)) * jnp.ones((8, 1))
        return jax.nn.softmax(values @ w), jnp.argmax(values, axis=-1)

    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    with pytest.warns(UserWarning, match="on m0 is compiled by XLA in part:") as said:
        compiled = one_stage(spectrum).compiled(x, x)
    assert len(said) == 1 and "lapack_ssyevd_ffi" in str(said[0].message)
    costs = compiled.cost_analysis()
    assert costs["fallbacks"] == 1 and costs["flops"] >= 2 * 2 * 8**3
    kinds = [line.split()[2] for line in compiled.as_text("clusters").splitlines() if "cluster" in line]
    assert kinds == ["native,", "XLA,", "native,"]
    assert compiled.as_text("thunks").count("matmul") == 2
    assert "lapack_ssyevd_ffi" in compiled.as_text("hlo")
    with pytest.raises(ConfigError, match="there is no text 'poem' of a step\n  there are .*'mpmd'.*'llvm'"):
        compiled.as_text("poem")
    (memory,) = compiled.fragment_memory().values()
    assert memory.code > 0 and memory.temporaries > 0
    for got, wanted in zip(compiled(x, x), spectrum(x, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5)


SEVERAL = [(name, mesh) for name in SHARDED_MODELS for mesh in MESHES if mesh != "one device"]
QUICK_SEVERAL = {("mlp", "two and two"), ("mixture", "four for tensors")}


def check_native(jitted, step, state, batch):
    """Trains as with `jax.jit`, and all of it natively."""
    compiled = jitted.compiled(state, *batch)
    assert {e.backend for e in compiled.executables.values()} == {"native"}
    assert compiled.cost_analysis()["fallbacks"] == 0
    check_training(jitted, jax.jit(step), state, batch)
    jitted.clear_cache()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param(*c, marks=[] if c in QUICK_SEVERAL else pytest.mark.slow) for c in SEVERAL],
)
def test_models_on_meshes_of_several_devices_train_as_with_jit(name, mesh):
    model, axes = SHARDED_MODELS[name](), MESHES[mesh]
    init, update = sgd_momentum()
    step = training_step(model.loss, 2, update)
    options = {**shardings(model, axes), "backend": "native"}
    native = pipelined(step, STAGES, mesh=axes, options=options, donate_argnums=0)
    check_native(native, step, init(model.params), model.batch)


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        pytest.param(n, m, marks=[] if (n, m) == ("mlp", "data here, tensors there") else pytest.mark.slow)
        for n in SHARDED_MODELS
        for m in UNLIKE
    ],
)
def test_models_on_meshes_that_are_not_alike_train_as_with_jit(name, meshes):
    model, axes = SHARDED_MODELS[name](), UNLIKE[meshes]
    init, update = sgd_momentum()
    step = training_step(model.loss, 2, update)
    native = pipelined_on(step, axes, {**shardings(model, axes[0] | axes[1]), "backend": "native"})
    check_native(native, step, init(model.params), model.batch)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_shardings_inside_and_at_the_border_are_kept(case):
    mesh, options, constraint = CASES[case]
    params, loss, batch = two_layers(constraint)
    init, update = sgd_momentum()
    options = {**options, "backend": "native"}
    native = pipelined(training_step(loss, 2, update), 2, mesh=mesh, options=options, donate_argnums=0)
    check_native(native, training_step(two_layers()[1], 2, update), init(params), batch)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 4}, {"data": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("name", ["tied", "mixture", "shared_by_all", "scanned_layers", "dropout"])
def test_models_on_sharded_batches_train_as_with_jit(name, mesh):
    params, loss, batch = MODELS[name].build(2)
    init, update = sgd_momentum()
    step = training_step(loss, 2, update)
    options = {"in_shardings": (None, *(P("data") for _ in batch)), "backend": "native"}
    native = pipelined(step, 2, mesh=mesh, options=options, donate_argnums=0)
    check_native(native, step, init(params), batch)


def test_the_memory_of_a_device_is_that_of_its_part():
    x, w = np.ones((4, 8), np.float32), np.ones((8, 16), np.float32)
    axes = {"in_shardings": (P("data"), None)}
    compiled = one_stage(lambda x, w: jnp.tanh(x @ w), mesh={"data": 2}, **axes).compiled(x, w)
    (memory,) = compiled.fragment_memory().values()
    assert memory.arguments == x.nbytes // 2 + w.nbytes
    assert "num_partitions=2" in compiled.as_text("hlo")


def test_whoever_calls_does_not_wait_for_large_fragments():
    """XLA runs programs with fewer than a thousand operations in the thread that calls them."""

    def counted(size):
        x = np.ones((size, size), np.float32)
        (made,) = one_stage(lambda x: x @ x).compiled(x).executables.values()
        np.testing.assert_array_equal(made(x)[0], np.full((size, size), size, np.float32))
        return made.compiled.cost_analysis()["flops"]

    assert counted(512) >= 1000 > counted(4)


def test_every_step_of_compilation_can_be_dumped(tmp_path):
    options = dataclasses.replace(PipelineOptions(), dump_to=str(tmp_path))
    one_stage(jax.nn.softmax, options=options).compiled(np.ones((4, 8), np.float32))
    (folder,) = (tmp_path / "fragments").iterdir()
    found = {p.name for p in folder.iterdir()}
    assert found >= {
        "before_optimizations.txt",
        "after_optimizations.txt",
        "buffer-assignment.txt",
        "thunk_sequence.txt",
        "kernels.txt",
        "module.ll",
    }
    assert any(name.endswith("hlo-fusion.txt") for name in found)


def test_large_fragments_run_on_all_cores_of_their_mesh(monkeypatch):
    from mpmd.api import aot

    monkeypatch.setattr(aot, "cores_of_own", lambda topology, exchange: dict.fromkeys(topology, (0, 0, 0)))
    made = []
    start = WorkerPool.__init__
    monkeypatch.setattr(WorkerPool, "__init__", lambda pool, *how: (made.append(how), start(pool, *how))[0])
    x = np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)
    for size, pools in ((8, []), (512, [(3, (0, 0, 0))])):
        part = x[:size, :size]
        got = one_stage(lambda x: jnp.tanh(x @ x)).compiled(part)(part)
        np.testing.assert_allclose(got, np.tanh(part @ part), rtol=2e-4, atol=2e-4)
        assert made == pools
