"""Collectives that start, let other work run, and end: the same numbers, whoever comes late."""

from __future__ import annotations

import ctypes
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_cpu.compilation import NativeCpu
from mpmd.compile.backends.native_cpu.exchange import Exchange, Publish, Settle
from mpmd.compile.backends.native_cpu.ffi import register
from mpmd.compile.backends.native_cpu.meeting import MESH_AT
from mpmd.compile.backends.native_cpu.mesh_call import SLOT
from mpmd.compile.backends.native_cpu.program import Run
from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import parse_module
from mpmd.compile.options import CompileOptions
from mpmd.compile.thunks.check import check_thunks
from mpmd.compile.thunks.emission import KernelPlans
from mpmd.compile.thunks.thunk import CollectiveThunk, CopyThunk, StartThunk, conflict
from mpmd.errors import CompileError
from tests.support.assignment_check import check_assignment
from tests.support.native_meshes import OnMesh, call_on, mesh_of, values

pytestmark = pytest.mark.usefixtures("plain_xla")

TOGETHER = CompileOptions(disable_passes=("hlo-async-collective-creator",))
EAGER = CompileOptions(pass_options=("hlo-latency-hiding-schedule{latency=1 keep-peak=false}",))


def work(a, b):
    """Sums of products, and products that need none of the sums."""
    x = lax.psum(a @ b, "x")
    y = jnp.tanh(b @ b)
    z = lax.all_gather(y, "x", axis=0, tiled=True)
    w = lax.psum_scatter(a @ b.T, "x", scatter_dimension=1, tiled=True)
    return x * 2 + jnp.sin(b).sum(), z.sum(0) + y, w, lax.ppermute(jnp.cos(a), "x", [(0, 1), (1, 0)])


GIVEN, WANTED = (P("x"), P()), (P(), P(), P("x", None), P("x"))


def on_two(function=work, backend=None, given=GIVEN, wanted=WANTED, size=64):
    return OnMesh(
        function, [values(2 * size, size), values(size, size)], mesh_of({"x": 2}), given, wanted, backend
    )


def prepared(made, *, poison=False, options=None, module=None):
    return prepare_fragment(
        made.fragment, NativeCpu(), options or CompileOptions(), module, axes={"x": 2}, poison=poison
    )


def checked(made):
    """A prepared fragment's memory, checked by the two checks."""
    plans, assignment = KernelPlans(), made.assignment
    plans.plan_all(made.module.call_order())
    check_assignment(assignment, plans.may_share)
    check_thunks(made.module, made.thunks, assignment.at, assignment.allocations, assignment.results)
    return made


def test_every_collective_starts_and_ends():
    made = on_two()
    made.check(1e-5)
    thunks = checked(prepared(made)).thunks
    begun = [t.name for t in thunks if isinstance(t, StartThunk)]
    assert len(begun) == 4
    assert sorted(begun) == sorted(t.start for t in thunks if isinstance(t, CollectiveThunk))


def test_other_work_runs_between_a_start_and_its_end():
    def function(a, b):
        return lax.psum(a @ b, "x") * 2, jnp.tanh(jnp.sin(b) @ jnp.cos(b))  # no product to share

    made = on_two(function, given=GIVEN, wanted=(P(), P()), size=256)
    made.check(1e-4)
    kinds = [type(step) for step in checked(prepared(made, options=EAGER)).program.threaded.steps]
    assert Run in kinds[kinds.index(Publish) : kinds.index(Exchange)], kinds


def test_devices_wait_for_the_end_only_where_they_touch_what_was_exchanged():
    def function(a, b):
        y = jnp.tanh(b @ b)
        x = lax.all_gather(a, "x", axis=0, tiled=True)
        return x @ b, y

    made = on_two(function, given=GIVEN, wanted=(P(), P()))
    made.check(1e-4)
    kinds = [type(s) for s in prepared(made).program.threaded.steps]
    assert Run in kinds[kinds.index(Exchange) : kinds.index(Settle)], "what was gathered is read at once"


def test_sums_are_made_in_place():
    made = checked(prepared(on_two(lambda a, b: lax.psum(a @ b, "x") + 1, given=GIVEN, wanted=P())))
    (start,) = (t for t in made.thunks if isinstance(t, StartThunk))
    assert start.reads == start.writes


def test_what_was_started_is_not_touched_before_its_end():
    """No thunk touches it, and one that would is found by the check."""
    made = checked(prepared(on_two()))
    thunks, assignment = list(made.thunks), made.assignment
    starts = {t.name: place for place, t in enumerate(thunks) if isinstance(t, StartThunk)}
    spoiled = 0
    for end, thunk in enumerate(thunks):
        if isinstance(thunk, CollectiveThunk):
            start = thunks[starts[thunk.start]]
            assert not any(conflict(t, start) for t in thunks[starts[thunk.start] + 1 : end])
            for place in (*start.reads, *start.writes):
                copy = CopyThunk("late", Slice(0, 0, place.size), place)
                if place.allocation == 0 or place.size > assignment.allocations[0].size:
                    continue
                wrong = [*thunks[:end], copy, *thunks[end:]]
                spoiled += 1
                with pytest.raises(CompileError, match=f"-done {thunk.name}.* should hold"):
                    check_thunks(
                        made.module, wrong, assignment.at, assignment.allocations, assignment.results
                    )
    assert spoiled


def test_poison_in_free_memory_changes_nothing():
    made = on_two()
    compiled = prepare_fragment(made.fragment, NativeCpu(), axes={"x": 2}, poison=True).compiled()
    backend = NativeCpuBackend()
    poisoned = backend.load(compiled.artefact(), made.fragment, mesh_of({"x": 2}))
    for got, want in zip(poisoned(*made.arguments), made.jitted(*made.arguments), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def late(k):
    """Work that takes a device the longer the larger k is."""
    return lax.fori_loop(0, k * 2000, lambda i, x: jnp.sin(x) + 1, jnp.float32(0)) * 0


@pytest.mark.parametrize("options", [CompileOptions(), TOGETHER], ids=["apart", "together"])
def test_devices_that_come_at_different_times(options):
    def function(a, b):
        for turn in range(4):
            who = (lax.axis_index("x") + turn) % 4
            a = a + late(who)
            total = lax.psum(a, "x") / 4
            a = jnp.tanh(total @ b) + lax.ppermute(a, "x", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return a

    arguments = [values(32, 16), values(16, 16) / 8]
    backend = NativeCpuBackend(options=options)
    made = OnMesh(function, arguments, mesh_of({"x": 4}), [P("x"), P()], P("x"), backend)
    for _ in range(5):
        made.check(1e-4)


STARTED = """HloModule m, num_partitions=2
add { a = f32[] parameter(0)  b = f32[] parameter(1)  ROOT c = f32[] add(a, b) }
scatter { p = f32[2,6] parameter(0)
  ROOT r = f32[1,6] reduce-scatter(p), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true,
    dimensions={0}, to_apply=add }
ENTRY e {
  x = f32[2,6] parameter(0)
  y = f32[2,6] negate(x)
  z = f32[2,6] exponential(x)
  s = ((f32[2,6]), f32[1,6]) async-start(y), calls=scatter
  g = (f32[1,6], f32[2,6]) all-gather-start(w), channel_id=2, replica_groups={{0,1}}, dimensions={0},
    use_global_device_ids=true
  w = f32[1,6] slice(z), slice={[0:1], [0:6]}
  q = (f32[2,6], f32[2,6]) collective-permute-start(z), channel_id=3, source_target_pairs={{0,1}}
  t = f32[2,6] all-reduce-start(z), channel_id=4, replica_groups={{0,1}}, use_global_device_ids=true,
    to_apply=add
  td = f32[2,6] all-reduce-done(t)
  qd = f32[2,6] collective-permute-done(q)
  gd = f32[2,6] all-gather-done(g)
  sd = f32[1,6] async-done(s)
  ROOT r = (f32[1,6], f32[2,6], f32[2,6], f32[2,6]) tuple(sd, gd, qd, td)
}
"""


def test_all_kinds_of_starts_under_way_at_the_same_time():
    a = values(4, 6)

    def function(a):
        e = jnp.exp(a)
        return (
            lax.psum_scatter(-a, "x", scatter_dimension=0, tiled=True),
            lax.all_gather(e[:1], "x", axis=0, tiled=True),
            lax.ppermute(e, "x", [(0, 1)]),
            lax.psum(e, "x"),
        )

    wanted = (P("x"), P(), P("x"), P())
    made = OnMesh(function, [a], mesh_of({"x": 2}), [P("x")], wanted)
    lines = STARTED.replace("  w = f32[1,6] slice(z), slice={[0:1], [0:6]}\n", "")
    lines = lines.replace("  s = ((", "  w = f32[1,6] slice(z), slice={[0:1], [0:6]}\n  s = ((")
    module = parse_module(lines)
    compiled = prepare_fragment(made.fragment, NativeCpu(), module=module, axes={"x": 2}).compiled()
    assert sum(isinstance(t, StartThunk) for t in compiled.thunks) == 4
    native = NativeCpuBackend().load(compiled.artefact(), made.fragment, mesh_of({"x": 2}))
    for got, want in zip(native(*made.arguments), made.jitted(*made.arguments), strict=True):
        for mine, its in zip(got.addressable_shards, want.addressable_shards, strict=True):
            np.testing.assert_allclose(mine.data, its.data, rtol=1e-5)


# -- launches that fail -----------------------------------------------------------------------------------


def sum_on_two(monkeypatch, patience):
    """A sum over two devices, and its program: whoever waits gives up after so many naps."""
    monkeypatch.setitem(register.__kwdefaults__, "patience", patience)
    made = OnMesh(lambda a: lax.psum(a, "x") + patience, [values(2, 3)], mesh_of({"x": 2}), [P("x")], P())
    return made, NativeCpuBackend().register(made.native.made, made.fragment.mesh, mesh_of({"x": 2}))


def test_a_launch_that_failed_leaves_the_next_one_whole(monkeypatch):
    made, program = sum_on_two(monkeypatch, 20)
    for device in (0, 1, 1, 0):
        with pytest.raises(jax.errors.JaxRuntimeError, match="waited too long for the other devices"):
            call_on(program, jax.devices()[device]).block_until_ready()
        made.check()


def test_a_device_that_waits_for_a_launch_that_others_never_had_is_told_by_the_next_one(monkeypatch):
    made, program = sum_on_two(monkeypatch, 500_000)
    errors = []

    def alone():
        try:
            call_on(program, jax.devices()[0]).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=alone)
    waiting.start()
    layout = made.native.made.code.mesh
    barrier = ctypes.c_void_p.from_address(program.memory.ctypes.data + SLOT["barrier"]).value
    meeting = ctypes.c_void_p.from_address(barrier + MESH_AT).value
    arrived = ctypes.cast(meeting + layout.barrier(-1, 0), ctypes.POINTER(ctypes.c_int64))
    while waiting.is_alive() and not arrived[0]:
        time.sleep(1e-3)
    made.check()
    waiting.join()
    made.check()
    assert len(errors) == 1
    assert "different launches" in errors[0]


def test_a_failure_inside_of_a_program_leaves_the_next_call_whole(monkeypatch):
    """In the first call the devices take different branches, in the second the same one."""
    monkeypatch.setitem(register.__kwdefaults__, "patience", 22)

    def function(a, alike):
        both = lax.psum(a, "x")
        some = (lax.axis_index("x") == 0) | (alike[0] == 1)
        return lax.cond(some, lambda x: lax.psum(x, "x") + both, lambda x: x - both, jnp.cos(a))

    arguments = [values(4, 6), np.ones(1, np.int32)]
    made = OnMesh(function, arguments, mesh_of({"x": 2}), [P("x"), P()], P("x"))
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="or took another branch"):
            jax.block_until_ready(made.native(made.arguments[0], np.zeros(1, np.int32)))
        made.check(1e-5)
