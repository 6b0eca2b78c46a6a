"""The native backend trains every model as `jax.jit` does, and compiles all of their fragments itself."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.errors import CompileError
from mpmd.options import PipelineOptions
from mpmd.runtime.clients import _available_cores
from tests.support.comparing import check_training, pipelined, sgd_momentum, training_step
from tests.support.flax_models import FLAX_MODELS
from tests.support.models import MODELS

ALL = MODELS | FLAX_MODELS
QUICK = ("uneven", "mixture", "scanned_layers", "half_precision")


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


def test_the_texts_of_a_fragment():
    x = np.ones((4, 8), np.float32)
    compiled = one_stage(jax.nn.softmax).compiled(x)
    assert "kind=kInput" in compiled.as_text("hlo")
    assert "allocation 0: parameter 0" in compiled.as_text("buffers")
    assert compiled.as_text("thunks").count("kernel ") == 1
    assert "reduce-maximum" in compiled.as_text("kernels")
    assert "define " in compiled.as_text("llvm")
    assert "stablehlo" in compiled.as_text("stablehlo")
    with pytest.raises(CompileError, match="there is no text 'poem'"):
        compiled.as_text("poem")


def test_costs_and_memory():
    x, w = np.ones((4, 8), np.float32), np.ones((8, 16), np.float32)
    compiled = one_stage(lambda x, w: jnp.tanh(x @ w)).compiled(x, w)
    assert compiled.cost_analysis()["flops"] >= 2 * 4 * 8 * 16
    (memory,) = compiled.fragment_memory().values()
    assert (memory.arguments, memory.results) == (x.nbytes + w.nbytes, 4 * 16 * 4)
    assert memory.code > 0


def test_what_native_code_cannot_do_is_compiled_by_xla_with_a_warning():
    def fourier(x):
        return jnp.abs(jnp.fft.fft(x))

    x = np.ones((4, 8), np.float32)
    with pytest.warns(
        UserWarning, match=r"on m0 is compiled by XLA as a whole:\n  .*: kernels have no"
    ) as said:
        compiled = one_stage(fourier).compiled(x)
    assert len(said) == 1 and str(said[0].message).count("\n") == 3
    assert compiled.cost_analysis()["fallbacks"] == 1
    assert "cluster 0: XLA, the whole fragment\n  convert" in compiled.as_text("clusters")
    np.testing.assert_allclose(compiled(x), fourier(x), rtol=1e-6)


def test_the_rest_of_a_fragment_stays_native():
    def spectrum(x, w):
        values = jnp.abs(jnp.fft.fft(jnp.tanh(x @ w)))
        return jax.nn.softmax(values @ w), jnp.argmax(values, axis=-1)

    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    with pytest.warns(UserWarning, match="on m0 is compiled by XLA in part:") as said:
        compiled = one_stage(spectrum).compiled(x, x)
    assert len(said) == 1 and ".fft" not in str(said[0].message) and "fft." in str(said[0].message)
    costs = compiled.cost_analysis()
    assert costs["fallbacks"] == 1 and costs["flops"] >= 2 * 2 * 8**3
    kinds = [line.split()[2] for line in compiled.as_text("clusters").splitlines() if "cluster" in line]
    assert kinds == ["native,", "XLA,", "native,"]
    assert compiled.as_text("thunks").count("matmul") == 2
    assert "fft" in compiled.as_text("hlo")
    with pytest.raises(CompileError, match="there is no text 'poem'"):
        compiled.as_text("poem")
    (memory,) = compiled.fragment_memory().values()
    assert memory.code > 0 and memory.temporaries > 0
    for got, wanted in zip(compiled(x, x), spectrum(x, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5)


def test_meshes_of_several_devices_are_compiled_by_xla_and_counted():
    x = np.ones((4, 8), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = one_stage(jnp.tanh, mesh=2).compiled(x)
    assert compiled.cost_analysis()["fallbacks"] == 1
    assert "native fragments run on meshes of one device" in compiled.as_text("clusters")
    np.testing.assert_allclose(compiled(x), np.tanh(x), rtol=1e-6)


def test_whoever_calls_does_not_wait_for_large_fragments():
    """XLA runs programs with fewer than a thousand operations in the thread that calls them."""

    def counted(size):
        x = np.ones((size, size), np.float32)
        (made,) = one_stage(lambda x: x @ x).compiled(x).executables.values()
        np.testing.assert_array_equal(made(x)[0], np.full((size, size), size, np.float32))
        return made.compiled.cost_analysis()["flops"]

    assert counted(256) >= 1000 > counted(4)


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
    from mpmd.api import stages

    monkeypatch.setattr(stages, "cores_of_meshes", lambda topology: dict.fromkeys(topology, (0, 0, 0)))
    made = []
    start = WorkerPool.__init__
    monkeypatch.setattr(WorkerPool, "__init__", lambda pool, *how: (made.append(how), start(pool, *how))[0])
    x = np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)
    for size, pools in ((8, []), (512, [(3, (0, 0, 0))])):
        part = x[:size, :size]
        got = one_stage(lambda x: jnp.tanh(x @ x)).compiled(part)(part)
        np.testing.assert_allclose(got, np.tanh(part @ part), rtol=2e-4, atol=2e-4)
        assert made == pools


def test_meshes_of_one_client_share_its_cores_out():
    from mpmd.api.stages import cores_of_meshes

    shared = mpmd.make_topology({"a": 1, "b": 1, "c": 1}, pinning="never")
    cores = cores_of_meshes(shared)
    assert set(cores) == {"a", "b", "c"} and all(cores.values())
    assert len({core for mesh in cores.values() for core in mesh}) == len(_available_cores())
