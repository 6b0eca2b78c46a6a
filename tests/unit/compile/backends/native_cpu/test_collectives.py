"""Collectives as native code: the same numbers as XLA's on every device, and failures that end."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from mpmd.compile.backends.native_cpu import dispatch
from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_cpu.barrier import MeshLayout
from mpmd.compile.backends.native_cpu.ffi import register
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.planner import NoPlan
from mpmd.compile.kernels.planner.collectives import CollectivePlan
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.thunks.emission import KernelPlans
from mpmd.cost.device import HOST
from mpmd.errors import CompileError
from tests.support.native_meshes import COLLECTIVES, OnMesh, call_on, giving_up_after, mesh_of, values
from tests.support.program_instance import ProgramInstance

pytestmark = pytest.mark.usefixtures("plain_xla")

DTYPES = {"float32": 1e-6, "bfloat16": 1e-2, "int32": 0, "uint8": 0}


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in list(DTYPES)[1:])]
)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_on_four_devices(name, dtype):
    function, given, wanted = COLLECTIVES[name]
    OnMesh(function, [values(8, 12, dtype=dtype)], mesh_of({"x": 2, "y": 2}), [given], wanted).check(
        DTYPES[dtype]
    )


def test_narrow_floats_are_summed_in_wide_ones():
    a = np.array([[256], [1], [1], [1]], jnp.bfloat16)  # one after the other in bf16, the ones would be lost
    mesh = mesh_of({"x": 4})
    (got,) = OnMesh(lambda a: lax.psum(a, "x"), [a], mesh, [P("x")], P()).native(a)
    assert got.dtype == jnp.bfloat16
    assert float(got[0, 0]) == float(jnp.bfloat16(259))


def test_truth_values_are_joined_by_or():
    a = np.arange(16).reshape(4, 4) % 5 == 0
    OnMesh(lambda a: lax.pmax(a, "x"), [a], mesh_of({"x": 4}), [P("x")], P()).check()


def test_several_arrays_of_one_collective_and_arrays_that_do_not_divide():
    def function(a, b):
        return lax.psum((a, b, a.sum()), "x")

    arguments = [values(4, 7), values(4, 3)]
    made = OnMesh(function, arguments, mesh_of({"x": 4}), [P("x"), P("x")], (P(), P(), P()))
    made.check(1e-5)
    lines = made.native.as_text("thunks").splitlines()
    assert sum(line.startswith("all-reduce ") for line in lines) == 1


def test_collectives_inside_of_loops_and_branches():
    def function(a):
        def body(k, x):
            x = lax.cond(k % 2 == 0, lambda x: lax.psum(x, "x") / 2, lambda x: x * 1.5, x)
            return lax.ppermute(x, "y", [(0, 1), (1, 0)]) + lax.axis_index("x")

        return lax.fori_loop(0, 5, body, a)

    OnMesh(function, [values(8, 6)], mesh_of({"x": 2, "y": 2}), [P("x", "y")], P("x", "y")).check(1e-5)


def test_groups_may_take_different_branches():
    def function(a):
        return lax.cond(lax.axis_index("y") == 0, lambda a: lax.psum(a, "x") * 2, lambda a: a - 1, a)

    OnMesh(function, [values(8, 6)], mesh_of({"x": 2, "y": 2}), [P("x", "y")], P("x", "y")).check()


def test_devices_that_are_not_the_first_of_their_client():
    a = values(4, 6)
    OnMesh(
        lambda a: lax.psum(a, "x") + lax.axis_index("x"), [a], mesh_of({"x": 2}, 5), [P("x")], P("x")
    ).check()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_one_device(name):
    function, given, wanted = COLLECTIVES[name]

    def alone(a):
        pairs = [(0, 0)] if name == "permutation" else []
        return lax.ppermute(a, "x", pairs) if name.startswith("permutation") else function(a)

    OnMesh(alone, [values(8, 12)], mesh_of({"x": 1, "y": 1}), [given], wanted).check()


def test_each_device_on_several_threads(monkeypatch):
    monkeypatch.setattr(dispatch, "_RATES", dataclasses.replace(HOST.dispatch, wake_seconds=0.0))

    def function(a, b):
        return lax.psum(jnp.tanh(a @ b), "x") * 2

    arguments = [values(8, 32), values(32, 16)]
    made = OnMesh(function, arguments, mesh_of({"x": 2}), [P("x"), P()], P(), NativeCpuBackend(threads=4))
    for _ in range(20):
        made.check(1e-5)


def test_calls_that_follow_each_other_at_once():
    """Two programs of one mesh, launched without waiting: every device runs them in the same order."""
    mesh = mesh_of({"x": 4})
    a = values(8, 64)
    double = OnMesh(lambda a: a / 2 + lax.psum(a, "x") / 8, [a], mesh, [P("x")], P("x"))
    turn = OnMesh(
        lambda a: lax.ppermute(a, "x", [(0, 1), (1, 2), (2, 3), (3, 0)]), [a], mesh, [P("x")], P("x")
    )
    x = y = double.arguments[0]
    for _ in range(30):
        (x,), y = double.native(x), double.jitted(y)
        (x,), y = turn.native(x), turn.jitted(y)
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5)


# -- what cannot be ---------------------------------------------------------------------------------------


def sum_of_two():
    made = OnMesh(lambda a: lax.psum(a, "x"), [values(2, 3)], mesh_of({"x": 2}), [P("x")], P())
    return made.program()


def test_a_device_that_waits_in_vain_gives_up_with_an_error():
    program = sum_of_two()
    for _ in range(2):  # each launch waits for itself
        with (
            giving_up_after(program, 20),
            pytest.raises(jax.errors.JaxRuntimeError, match="waited too long for the other devices"),
        ):
            call_on(program, jax.devices()[0]).block_until_ready()


def test_devices_that_take_different_branches_give_up_with_an_error():
    """Device 0 waits for a sum that device 1 does not take part in; its loop must end, too."""

    def function(a):
        def body(state):
            k, x = state
            return k + 1, lax.cond(lax.axis_index("x") == 0, lambda x: lax.psum(x, "x"), lambda x: x, x)

        return lax.while_loop(lambda s: (lax.axis_index("x") == 0) | (s[0] < 3), body, (0, a))[1]

    made = OnMesh(function, [values(4, 6)], mesh_of({"x": 2}), [P("x")], P("x"))
    with (
        giving_up_after(made.program(), 20),
        pytest.raises(jax.errors.JaxRuntimeError, match="or took another branch"),
    ):
        jax.block_until_ready(made.native(*made.arguments))


def test_a_device_of_another_mesh_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="a device that it was not loaded for"):
        call_on(sum_of_two(), jax.devices()[3]).block_until_ready()


def test_a_program_is_loaded_for_as_many_devices_as_it_was_compiled_for():
    made = OnMesh(lambda a: lax.psum(a, "x"), [values(2, 3)], mesh_of({"x": 2}), [P("x")], P())
    with pytest.raises(CompileError, match="runs on 2 devices; it was given 3"):
        register(made.native.artefact.code, host_target(), devices=(0, 1, 2))


def test_a_program_of_several_devices_does_not_run_by_itself():
    made = OnMesh(lambda a: lax.psum(a, "x"), [values(2, 3)], mesh_of({"x": 2}), [P("x")], P())
    with pytest.raises(CompileError, match="one of 2 devices: they run it inside of JAX"):
        ProgramInstance(made.native.artefact.code, host_target())


def test_groups_of_different_sizes_have_a_plan_but_no_kernel():
    text = """HloModule m, num_partitions=4
add { a = f32[] parameter(0)  b = f32[] parameter(1)  ROOT c = f32[] add(a, b) }
ENTRY e { p = f32[4]{0} parameter(0)
  ROOT r = f32[4]{0} all-reduce(p), channel_id=1, replica_groups={{0,1,2},{3}}, to_apply=add,
    use_global_device_ids=true }
"""
    total = parse_module(text).entry.root
    plan = KernelPlans().of(total)
    assert isinstance(plan, CollectivePlan)
    assert [len(sources) for sources in plan.sources] == [3, 3, 3, 1]
    with pytest.raises(NoPlan, match=r"groups of one size, at most 16; these have \[1, 3\] devices"):
        KernelPlans(NativeCpu().refuses).of(total)


def test_the_memory_of_a_mesh_does_not_overlap():
    layout = MeshLayout(devices=4, arrays=5, exchanges=3)
    ranges = [(0, 16)]
    ranges += [(layout.failed(d), layout.failed(d) + 8) for d in range(4)]
    ranges += [(layout.array(d, n), layout.array(d, n) + 8) for d in range(4) for n in range(5)]
    ranges += [(layout.barrier(m, d), layout.barrier(m, d) + 128) for m in range(-1, 3) for d in range(4)]
    ordered = sorted(ranges)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))
    assert ordered[-1][1] == layout.bytes
