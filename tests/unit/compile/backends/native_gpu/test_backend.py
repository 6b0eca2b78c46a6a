"""Fragments on a stand-in GPU through JAX: loading, calls, donation, faults, and what XLA takes over."""

import ctypes
import dataclasses
import gc
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import mpmd
from mpmd.compile.backends import targets
from mpmd.compile.backends.mixed.backend import MixedExecutable
from mpmd.compile.backends.native_gpu.backend import GpuExecutable, NativeGpuBackend
from mpmd.compile.backends.native_gpu.gpu import OpenGpu
from mpmd.compile.backends.native_gpu.gpu_devices import GPUS
from mpmd.compile.backends.native_gpu.libraries import CUBLASLT, CudaLibraries
from mpmd.compile.backends.native_gpu.loading import LoadedGpuProgram
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.compiler import FallbackBackend, get_backend
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.options import CompileOptions
from mpmd.errors import CompileError
from tests.support.gpu_launches import code_of
from tests.support.native_fragments import fragment_of
from tests.support.simulated_gpu import StandInGpu

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
HAS_TRITON = importlib.util.find_spec("triton") is not None
ISSUED = CompileOptions(command_buffers=False)
pytestmark = pytest.mark.usefixtures(
    "unpoisoned", "every_digit"
)  # poison is written by kernels, which need Triton


def mesh(device=0):
    return Mesh(np.array(jax.devices()[device : device + 1]), ("x",))


def products(x, w):
    return jnp.dot(jnp.dot(x, w).T, w)


def compiled(function, *arguments, gpu, device=0, donated=()):
    backend = FallbackBackend(NativeGpuBackend.of(mesh(device), ISSUED, gpu))
    return backend.compile(fragment_of(function, *arguments, donated=donated), mesh(device))


def test_a_fragment_is_one_call():
    gpu = StandInGpu()
    made = compiled(products, X, X, gpu=gpu)
    assert isinstance(made, GpuExecutable) and made.as_text("hlo")
    gpu.calls.clear()
    for _ in range(2):
        (got,) = made(jnp.asarray(X), jnp.asarray(X))
        np.testing.assert_allclose(got, products(X, X), rtol=1e-5, atol=1e-6)
    assert gpu.calls == ["cuCtxSetCurrent", "cublasLtMatmul", "cublasLtMatmul"] * 2 and not gpu.broken
    assert (
        made.cost_analysis()["fallbacks"] == 0 and made.memory_analysis().temporaries == made.workspace_bytes
    )
    assert "product 1x8x8x8" in made.as_text("launches")


def test_what_is_loaded_is_released_with_the_last_that_uses_it():
    gpu = StandInGpu(count=2)
    made = compiled(products, X, X, gpu=gpu)
    loaded = gpu.live
    assert loaded == {"descriptor": 2, "layout": 6}
    twin = compiled(products, X, X, gpu=gpu)
    assert gpu.live == loaded and twin.program is made.program  # the same program on the same GPU
    second = NativeGpuBackend.of(mesh(), ISSUED, gpu).relocate(made, made.fragment, mesh())
    assert second.program is made.program
    del made, twin
    gc.collect()
    assert gpu.live == loaded
    del second
    gc.collect()
    compiled(lambda x, w: x @ w, X, X, gpu=gpu)
    gc.collect()
    assert gpu.live["descriptor"] <= 1 and not gpu.broken


def test_every_call_of_loading_fails_once():
    """The error names program, call and what it was for; nothing is left; the next one loads."""
    program = prepare_fragment(fragment_of(lambda x, w: jnp.tanh(x @ w), X, X), GpuTarget()).program
    program = dataclasses.replace(program, constants=b"some")
    code, gpu = code_of(program), StandInGpu()
    loaded = LoadedGpuProgram(code, OpenGpu(gpu, 0))
    calls = list(gpu.calls)
    assert loaded.handler and gpu.live == {"module": 1, "memory": 1, "descriptor": 1, "layout": 3}
    assert {"cuModuleLoadDataEx", "cuFuncSetAttribute", "cuFuncGetAttribute", "cuMemcpyHtoD_v2"} <= set(calls)
    for number, name in enumerate(calls, 1):
        if name.endswith(RELEASING):
            continue
        gpu = StandInGpu()
        gpu.fail_at = number
        with pytest.raises(CompileError, match=f"{name} failed: CU") as failed:
            LoadedGpuProgram(code, OpenGpu(gpu, 0))
        if number > len(calls) - calls[::-1].index("cuDeviceGetAttribute"):  # to find out about the GPU
            assert WHAT.match(str(failed.value)), failed.value
        assert not gpu.live and not gpu.broken, name
        assert LoadedGpuProgram(code, OpenGpu(gpu, 0)).handler


RELEASING = ("Destroy", "Unload", "Free_v2")
WHAT = re.compile(
    r"GPU program f[0-9a-f]{16}: (the GPU's context|starting cuBLASLt|preparing the product 1x8x8x8|"
    r"loading kernel loop_|giving kernel loop_|copying 4 bytes of constants)"
)


def test_a_product_that_the_library_lacks_is_a_kernel():
    """Products of other sizes stay calls, and no part of the fragment is XLA's."""
    gpu = StandInGpu()
    gpu.lacks = lambda sizes: 6 in sizes

    def function(x, w, z):
        return x @ w, w @ z

    made = compiled(function, X, X, X[:, :6], gpu=gpu)
    assert isinstance(made, GpuExecutable)
    text = made.as_text("launches")
    assert text.count("product 1x8x8x8") == 1 and "product 1x8x6x8" not in text and "launch product_" in text
    assert made.target.key() != GpuTarget(made.target.gpu, made.target.compiler).key()
    if HAS_TRITON:
        for got, want in zip(made(*map(jnp.asarray, (X, X, X[:, :6]))), function(X, X, X[:, :6])):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not gpu.broken


def test_a_product_that_the_library_lacks_is_a_kernel_beside_xla_s_parts():
    """Another part of the fragment has no native code."""
    gpu, x, w = StandInGpu(), np.ones((64, 96), np.float32), np.ones((96, 80), np.float32)

    def function(x, w, ids):
        return jnp.sin(x @ w).at[ids].multiply(2.0)

    made = compiled(function, x, w, np.arange(3), gpu=gpu)
    assert isinstance(made, MixedExecutable) and "product 1x64x80x96" in made.as_text("launches")
    gpu.lacks = lambda sizes: 96 in sizes
    gc.collect()
    again = compiled(lambda *given: function(*given) + 1, x, w, np.arange(3), gpu=gpu)
    assert isinstance(again, MixedExecutable) and "launch product_" in again.as_text("launches")
    assert not gpu.broken


def test_boards_and_slices_of_one_name_differ():
    """Half of the processors at half of the clock, and memory at half of its rate."""
    whole = GPUS["H200"]
    assert OpenGpu(StandInGpu(), 0).model.device == dataclasses.replace(
        whole.device, levels=OpenGpu(StandInGpu(), 0).model.device.levels
    )
    gpu = StandInGpu(name="NVIDIA H200 MIG 3g.71gb")
    gpu.attributes |= {16: 66, 13: 990_000, 37: 3072, 38: 25 << 20, 97: 100 << 10}
    part = OpenGpu(gpu, 0).model
    assert (part.programs, part.shared_bytes, part.device.levels[1][0]) == (132, 100 << 10, 25 << 20)
    assert part.device.matmul_rate("bf16") == pytest.approx(whole.device.matmul_rate("bf16") / 4)
    assert part.device.bandwidth == pytest.approx(whole.device.bandwidth / 2)
    assert GpuTarget(part).key() != GpuTarget(whole).key()


def test_parameters_are_promised_to_begin_at_16_bytes():
    """Others may have allocated them, and results may be in their memory; the arena is XLA's."""
    gpu, promised = StandInGpu(), []
    keep = gpu._cublasLtMatmulPreferenceSetAttribute

    def kept(made, attribute, where, size):
        promised.append((attribute, ctypes.c_uint32.from_address(where).value))
        return keep(made, attribute, where, size)

    gpu._cublasLtMatmulPreferenceSetAttribute = kept
    gpu.cublaslt = type(gpu.cublaslt)(gpu, CUBLASLT)
    compiled(lambda x, w: x @ w, X, X, gpu=gpu)
    assert {value for attribute, value in promised if attribute in (5, 6, 7, 8)} == {16}


def test_a_program_that_does_not_load_is_left_to_xla():
    gpu = StandInGpu()
    compiled(products, X, X, gpu=gpu)
    number, gpu = 1 + gpu.calls.index("cublasLtMatrixLayoutCreate"), StandInGpu()
    gpu.fail_at = number
    made = compiled(products, X, X, gpu=gpu)
    assert made.backend == "xla" and "cublasLtMatrixLayoutCreate failed: CUBLAS" in made.reasons[0]
    assert isinstance(compiled(products, X, X, gpu=gpu), GpuExecutable)


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        (
            CudaLibraries(),
            r"this machine has no CUDA driver|GPU kernels are compiled by Triton, which is missing",
        ),
        (
            StandInGpu(name="NVIDIA GeForce RTX 9090"),
            "there is no description of GPU 'NVIDIA GeForce RTX 9090'",
        ),
        (StandInGpu(capability=100), r"of compute capability 10\.0; there are A100, H100, H200, B200"),
        (StandInGpu(problem="GPU kernels are compiled by Triton"), "GPU kernels are compiled by Triton"),
        (StandInGpu(count=0), "finding GPU 0: cuDeviceGet failed"),
    ],
)
def test_without_a_usable_gpu_xla_takes_over_and_says_why(gpu, problem):
    made = compiled(products, X, X, gpu=gpu)
    assert made.backend == "xla" and re.search(problem, made.reasons[0])
    (got,) = made(jnp.asarray(X), jnp.asarray(X))
    np.testing.assert_allclose(got, products(X, X), rtol=1e-5, atol=1e-6)


def test_native_is_the_target_of_the_platform_and_auto_leaves_gpus_to_xla():
    gpus = Mesh(np.array(jax.devices()[:1]), ("x",))
    assert "gpu" in targets.NATIVE and "gpu" not in targets.AUTOMATIC
    found = targets.NATIVE["gpu"](gpus, CompileOptions())
    assert isinstance(found, NativeGpuBackend) and found.problem
    assert get_backend("auto").targets.keys() == {"cpu"} and get_backend("native").targets.keys() == {
        "cpu",
        "gpu",
    }


def test_threads_call_programs_of_several_gpus_at_once():
    """Captured and not: each call has its own numbers, and what one captures is not another's."""
    gpu, calls = StandInGpu(count=2), []
    for device in range(2):
        for captured in (False, True):
            options = CompileOptions(command_buffers=captured)
            backend = NativeGpuBackend.of(mesh(device), options, gpu)
            made = backend.compile(fragment_of(products, X, X), mesh(device))
            calls.append((made, jax.device_put(X, jax.devices()[device])))

    def work(seed):
        made, w = calls[seed % len(calls)]
        for number in range(6):
            x = jax.device_put(X * (seed + number), w.device)
            (got,) = made(x, w)
            np.testing.assert_allclose(got, products(X * (seed + number), X), rtol=1e-4, atol=1e-4)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))
    assert not gpu.broken and len(gpu.contexts) == 2


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: make test-gpu")
def test_a_step_on_two_meshes_equals_jit(monkeypatch):
    """A whole step, its fragments on two stand-in GPUs: the arguments donated, twenty times."""
    gpu = StandInGpu(count=2)
    monkeypatch.setitem(targets.NATIVE, "cpu", lambda m, options: NativeGpuBackend.of(m, options, gpu))

    def step(w, x):
        def loss(w):
            h = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="one")(w[0], x)
            return mpmd.named_computation(lambda w, h: ((h @ w) ** 2).mean(), name="two")(w[1], h)

        value, gradients = jax.value_and_grad(loss)(w)
        return [a - 0.1 * g for a, g in zip(w, gradients)], value

    topology = mpmd.make_topology({"m0": 1, "m1": 1}, devices=jax.devices()[:2])
    config = mpmd.make_config(topology, {"one": "m0", "two": "m1"}, backend="native")
    ours, plain = mpmd.jit(step, config, donate_argnums=0), jax.jit(step)
    w = mine = [X * 0.1, X.T * 0.1]
    for _ in range(20):
        mine, found = ours(mine, X)
        w, wanted = plain(w, X)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert gpu.launched and not gpu.broken
    assert ours.lower(w, X).compile().cost_analysis()["fallbacks"] == 0
