"""Meshes of several stand-in GPUs: native parts between XLA's collectives, and a state for each device."""

import gc
import importlib.util
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from mpmd.compile.backends.mixed import MixedExecutable
from mpmd.compile.backends.native_gpu.backend import GpuExecutable, NativeGpuBackend, ordinals_of
from mpmd.compile.backends.xla import XlaExecutable
from mpmd.compile.compiler import FallbackBackend
from mpmd.compile.driver import compiled_or_kept
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.compile.hlo import parse_module
from mpmd.compile.options import CompileOptions
from tests.support.native_meshes import COLLECTIVES, OnMesh, call_on, mesh_of, values
from tests.support.simulated_gpu import WORKSPACE, StandInGpu

pytestmark = pytest.mark.usefixtures("unpoisoned", "every_digit", "plain_xla")
SLOW = pytest.mark.slow
HAS_TRITON = importlib.util.find_spec("triton") is not None
X, W = values(8, 16), values(16, 8) / 8


def backend_of(mesh, gpu, **options):
    return FallbackBackend(NativeGpuBackend.of(mesh, CompileOptions(**options), gpu))


def two_products(x, w):
    return lax.psum(x @ w, "x") @ w.T


def split_products(devices, gpu, **options):
    mesh = mesh_of({"x": devices})
    return on_mesh(mesh, backend_of(mesh, gpu, **options))


def on_mesh(mesh, backend):
    return OnMesh(two_products, [X, W], mesh, [P(None, "x"), P("x", None)], P(None, "x"), backend)


def kinds(executable):
    return [
        line.split()[2].rstrip(",") for line in executable.as_text("clusters").splitlines() if line[0] != " "
    ]


@pytest.mark.parametrize("devices", [pytest.param(2, marks=SLOW), 4, pytest.param(8, marks=SLOW)])
def test_what_is_between_collectives_is_one_call(devices):
    gpu = StandInGpu(count=8)
    made = split_products(devices, gpu)
    assert isinstance(made.native, MixedExecutable) and kinds(made.native) == ["native", "XLA", "native"]
    assert made.native.reasons == () and made.native.cost_analysis()["fallbacks"] == 0
    text = made.native.compiled.as_text()
    assert text.count('custom_call_target="mpmd_native"') == 2 and text.count(" all-reduce(") == 1
    assert len(made.native.programs) == 2  # which all devices call
    made.check(1e-5)
    assert len(gpu.contexts) == devices and not gpu.broken


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "own number"])
def test_every_collective_is_xla_s(name):
    function, given, wanted = COLLECTIVES[name]
    mesh, gpu = mesh_of({"x": 2, "y": 2}), StandInGpu(count=4)

    def product_before(a, w):
        return function(a @ w)

    given = [given, P()]
    width = 12 if given[0] == P("x", None) else 6
    arguments = [values(8, 12), np.eye(width, dtype=np.float32)]
    made = OnMesh(product_before, arguments, mesh, given, wanted, backend_of(mesh, gpu))
    assert kinds(made.native) == ["native", "XLA"] and made.native.cost_analysis()["fallbacks"] == 0
    made.check(1e-5)
    assert not gpu.broken


@SLOW
def test_each_device_has_a_state_of_its_own():
    """What one loads no other uses, and all of it goes with the last that calls it."""
    gpu = StandInGpu(count=4)
    made = split_products(4, gpu)
    assert gpu.live == {"descriptor": 4 * 2, "layout": 4 * 6}
    twin = FallbackBackend(NativeGpuBackend.of(mesh_of({"x": 4}), libraries=gpu))
    again = twin.relocate(made.native, made.fragment, mesh_of({"x": 4}))
    assert again.programs == made.native.programs and gpu.live["descriptor"] == 8
    kept = sum(program.kept_bytes for program in made.native.programs)
    assert kept == sum(made.native.kept_memory.values()) and kept % 4 == 0
    made.check(1e-5)
    del made, again
    gc.collect()
    split_products(4, gpu)
    assert gpu.live["descriptor"] == 4 * 2 and not gpu.broken


def test_calls_of_each_device_are_captured_by_themselves():
    gpu = StandInGpu(count=2)
    made = split_products(2, gpu, command_buffers=True)
    assert gpu.live["stream"] == 2 * 2
    wanted = np.asarray(made.jitted(*made.arguments))
    for _ in range(6):
        np.testing.assert_allclose(made.native(*made.arguments)[0], wanted, rtol=1e-4, atol=1e-5)
    assert not gpu.broken


@SLOW
def test_threads_call_programs_of_several_meshes_at_once():
    gpu = StandInGpu(count=8)
    found = [split_products(count, gpu, command_buffers=count == 2) for count in (2, 4, 8)]
    wanted = [np.asarray(made.jitted(*made.arguments)) for made in found]

    def work(number):
        made = found[number % 3]
        for _ in range(4):
            (got,) = made.native(*made.arguments)
            np.testing.assert_allclose(got, wanted[number % 3], rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert not gpu.broken and len(gpu.contexts) == 8


DEVICE = """
HloModule device, num_partitions=2

ENTRY main {
  ROOT number = u32[] partition-id()
}
"""


def number_of_device(mesh, gpu):
    """A program whose result is the number of the device in its mesh."""
    backend = NativeGpuBackend.of(mesh, libraries=gpu)
    fragment = FragmentModule("f", "mesh", DEVICE, (), (ValueSpec((2,), "ui32", (("x",),)),))
    made, _ = compiled_or_kept(fragment, backend.target, backend.options, parse_module(DEVICE))
    assert "fill device" in made.text("launches", backend.target)
    return backend.register(made, "mesh", mesh)


def test_a_program_knows_the_number_of_its_device_in_the_mesh():
    gpu, mesh = StandInGpu(count=6), mesh_of({"x": 2}, first=4)
    program = number_of_device(mesh, gpu)
    assert ordinals_of(mesh) == (4, 5)
    call = jax.shard_map(
        lambda: program(results=[jax.ShapeDtypeStruct((), np.uint32)])[0][None],
        mesh=mesh, in_specs=(), out_specs=P("x"), check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(call)(), [0, 1])
    assert not gpu.broken


def test_a_program_is_not_called_on_a_device_that_has_not_loaded_it():
    gpu = StandInGpu(count=8)
    program = number_of_device(mesh_of({"x": 2}, first=4), gpu)
    for device in (3, 6):
        with pytest.raises(jax.errors.JaxRuntimeError, match="called on a device that has not loaded it"):
            np.asarray(call_on(program, jax.devices()[device]))
    assert not gpu.broken


def test_the_gpus_of_a_mesh_are_of_one_kind():
    gpu = StandInGpu(count=2)
    gpu.unlike[1] = {16: 66}  # a slice with half of the processors
    made = split_products(2, gpu)
    assert made.native.backend == "xla"
    assert made.native.reasons == ("the GPUs of a mesh are of several kinds",)


def test_a_program_is_compiled_again_for_a_mesh_of_another_kind():
    gpu, mesh = StandInGpu(count=4), mesh_of({"x": 2}, first=2)
    made = on_mesh(mesh, backend_of(mesh, gpu))
    other = StandInGpu(name="NVIDIA A100", capability=80, count=2)
    moved = backend_of(mesh_of({"x": 2}), other).relocate(made.native, made.fragment, mesh_of({"x": 2}))
    assert moved.target.gpu.capability == 80 and made.native.target.gpu.capability == 90
    assert moved.mixed is not made.native.mixed


def test_the_arena_has_room_for_the_workspace_of_each_device():
    usual, wide = StandInGpu(count=2), StandInGpu(count=2)
    wide.workspaces[1] = 2 * WORKSPACE
    found = [split_products(2, gpu) for gpu in (usual, wide)]
    for less, more in zip(*(made.native.programs for made in found), strict=True):
        assert more.arena_bytes == less.arena_bytes + WORKSPACE
    found[1].check(1e-5)
    assert not wide.broken


def test_collectives_of_several_arrays_are_combined_by_xla_alone():
    mesh, gpu = mesh_of({"x": 2}), StandInGpu(count=2)

    def sums(x, w):
        return lax.psum((x @ w, w.T @ w), "x")

    made = OnMesh(sums, [X, W], mesh, [P(None, "x"), P("x", None)], (P(), P()), backend_of(mesh, gpu))
    assert kinds(made.native) == ["native", "XLA"]
    made.check(1e-5)


@SLOW
def test_a_device_that_does_not_load_leaves_the_mesh_to_xla():
    gpu = StandInGpu(count=2)
    split_products(2, gpu)
    made_last = len(gpu.calls) - gpu.calls[::-1].index("cublasLtMatmulDescCreate")
    gpu = StandInGpu(count=2)
    gpu.fail_at = made_last
    made = split_products(2, gpu)
    assert (
        made.native.backend == "xla" and "cublasLtMatmulDescCreate failed: CUBLAS" in made.native.reasons[0]
    )
    gpu.fail_at = 0
    gc.collect()
    split_products(2, gpu).check(1e-5)
    assert not gpu.broken


def loop(w, x):
    """The state has an array that begins as zeros."""

    def body(_, state):
        (h, _) = state
        return lax.psum(h @ w, "x") @ w.T, h @ w

    return lax.fori_loop(0, 5, body, (x, jnp.zeros((x.shape[0], w.shape[1]))))


def test_a_loop_with_a_collective_is_xla_s_and_its_body_is_ours():
    mesh, gpu = mesh_of({"x": 2}), StandInGpu(count=2)
    wanted = (P(None, "x"), P(None, "x"))
    made = OnMesh(loop, [W.T, X], mesh, wanted, wanted, backend_of(mesh, gpu))
    assert kinds(made.native) == ["XLA", "loop"] and made.native.cost_analysis()["fallbacks"] == 0
    inside = [line for line in made.native.as_text("clusters").splitlines() if line.startswith("  cluster")]
    assert [line.split()[2].rstrip(",") for line in inside] == ["native", "XLA", "native"]
    text = made.native.compiled.as_text()
    assert text.count('custom_call_target="mpmd_native"') == 2 and '"known_trip_count":{"n":"5"}' in text
    made.check(1e-4)
    products = made.native.cost_analysis()["flops"]
    assert products >= 5 * 2 * 2 * 8 * 8 * 4 and not gpu.broken


@SLOW
def test_a_branch_with_a_collective_is_xla_s_and_said_to_be():
    mesh, gpu = mesh_of({"x": 2}), StandInGpu(count=2)

    def branch(w, x, n):
        h = x @ w
        return lax.cond(n > 0, lambda h: lax.psum(h, "x"), lambda h: h, h) @ w.T

    cut = [P(None, "x"), P(None, "x"), P()]
    made = OnMesh(branch, [W.T, X, np.int32(1)], mesh, cut, P(None, "x"), backend_of(mesh, gpu))
    assert made.native.cost_analysis()["fallbacks"] == 1
    (reason,) = made.native.reasons
    assert "it holds all-reduce" in reason and reason.endswith("collectives are XLA's")
    if HAS_TRITON:
        made.check(1e-5)


def test_a_fragment_that_only_communicates_is_xla_s_and_no_fallback():
    mesh, gpu = mesh_of({"x": 2}), StandInGpu(count=2)
    made = OnMesh(lambda x: lax.psum(x, "x"), [X], mesh, [P("x")], P(), backend_of(mesh, gpu))
    assert isinstance(made.native, XlaExecutable) and made.native.reasons == ()
    assert made.native.cost_analysis().get("fallbacks", 0) == 0


def test_a_fragment_without_collectives_is_one_call():
    mesh, gpu = mesh_of({"x": 4}), StandInGpu(count=4)
    backend = backend_of(mesh, gpu)
    made = OnMesh(lambda x, w: x @ w, [X, W], mesh, [P("x"), P()], P("x"), backend, donated=(0,))
    assert isinstance(made.native, GpuExecutable)
    made.check(1e-5)
    assert len(gpu.contexts) == 4 and not gpu.broken
