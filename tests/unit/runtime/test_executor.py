from __future__ import annotations

import gc
import signal
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from mpmd.errors import ConfigError, FragmentError, ProgramError, SignatureError
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.streams import Run, task_text
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from tests.support.pipeline_graphs import (
    BODIES,
    FailedArray,
    Plain,
    X,
    chain,
    chain_executor,
    devices,
    make,
    random_inputs,
    sequential,
)

ISSUES = ("one-thread", "thread-per-mesh")


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 4), (4, 5), (3, 1)])
def test_1f1b_gives_the_sequential_result(issue, stages, microbatches):
    graph = one_f_one_b(stages, microbatches)
    with make(graph, issue=issue) as executor:
        for step in range(3):
            inputs = random_inputs(graph, step)
            got = executor.run(inputs)
            for want, array in zip(sequential(graph, inputs), got, strict=True):
                np.testing.assert_allclose(np.asarray(array), want, rtol=1e-5, atol=1e-6)
        executor.synchronize()


@pytest.mark.parametrize("issue", ISSUES)
def test_state_that_is_donated_is_gone_and_comes_back_as_a_result(issue):
    graph = one_f_one_b(2, 3)
    with make(graph, issue=issue) as executor:
        place = devices(2)
        arguments = [
            jax.device_put(a, place.sharding(graph.types[s.value]))
            for a, s in zip(random_inputs(graph), graph.inputs, strict=True)
        ]
        w0, w1, dx = executor.run(arguments)
        assert [a.is_deleted() for a in arguments] == [s.donated for s in graph.inputs]
        again = executor.run([w0, w1, *random_inputs(graph)[2:]])
        assert w0.is_deleted() and not dx.is_deleted()
        executor.synchronize()
        assert all(np.isfinite(np.asarray(a)).all() for a in again)


class TestWhoIssues:
    def executor(self, asynchronous, meshes=2):
        program = linearize(one_f_one_b(meshes, 2))
        executables = {
            (m, n): Plain(n, BODIES[n][0], asynchronous or m != "m0") for m, n in program.executables
        }
        return Executor(program, executables, devices(meshes))

    def test_one_thread_if_every_call_returns_at_once(self):
        with self.executor(True) as executor:
            assert executor.issues_from_one_thread
        with self.executor(False) as executor:
            assert not executor.issues_from_one_thread
        with self.executor(False, meshes=1) as executor:
            assert executor.issues_from_one_thread

    def test_calls_that_wait_overlap(self):
        """Each of two meshes waits 0.1 s in its own call: together less than the sum."""
        b = GraphBuilder()
        for mesh in ("m0", "m1"):
            b.output(*b.call("f", mesh, [b.input(mesh)]))
        program = linearize(b.graph())
        both = threading.Barrier(2, timeout=10)

        def wait(x):
            both.wait()  # passes only when both meshes are in their calls
            return (x,)

        executables = {pair: Plain("f", wait, asynchronous=False) for pair in program.executables}
        with Executor(program, executables, devices(2)) as executor:
            assert len(executor.run([X, X])) == 2


class TestThreads:
    def names(self):
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("mpmd-"))

    def test_they_stay_between_steps_and_end_with_close(self):
        graph = one_f_one_b(2, 2)
        executor = make(graph, issue="thread-per-mesh")
        assert self.names() == []
        for _ in range(3):
            executor.run(random_inputs(graph))
            assert self.names() == ["mpmd-m0", "mpmd-m1"]
        executor.close()
        assert self.names() == []
        with pytest.raises(ProgramError, match=r"^program 'main' was closed and cannot run again\n"):
            executor.run(random_inputs(graph))

    def test_they_end_with_the_executor(self):
        graph = one_f_one_b(2, 2)
        executor = make(graph, issue="thread-per-mesh")
        executor.run(random_inputs(graph))
        del executor
        gc.collect()
        assert self.names() == []

    def test_one_thread_needs_none(self):
        graph = one_f_one_b(2, 2)
        with make(graph, issue="one-thread") as executor:
            executor.run(random_inputs(graph))
            assert self.names() == []


def test_run_ahead_bounds_what_is_unfinished():
    b = GraphBuilder()
    x = b.input("m0")
    for _ in range(12):
        (x,) = b.call("f", "m0", [x])
    b.output(x)
    program = linearize(b.graph())
    open_calls, most = set(), [0]

    class Pending(FailedArray):
        def __init__(self):
            open_calls.add(self)
            most[0] = max(most[0], len(open_calls))
            self.polls = 0

        def is_ready(self):
            self.polls += 1
            if self.polls > 3:
                open_calls.discard(self)
            return self.polls > 3

        def block_until_ready(self):
            return self

    executables = {("m0", "f"): Plain("f", lambda x: (Pending(),))}
    with Executor(program, executables, devices(1), RuntimeOptions(run_ahead=4)) as executor:
        executor.run([X])
        executor.synchronize()
    assert most[0] == 4


def test_what_cannot_run_is_refused():
    program = linearize(chain())
    with pytest.raises(
        ProgramError, match=r"^executables are missing:\n  1. no executable: mesh 'm0' calls 'f'\n"
    ):
        Executor(program, {}, devices(2))
    with pytest.raises(ConfigError, match=r"^run_ahead is 0; a mesh needs at least 1 call on its way$"):
        chain_executor({}, run_ahead=0)
    with chain_executor({}) as executor:
        with pytest.raises(SignatureError, match=r"^got 2 arguments, compiled for 1\n"):
            executor.run([X, X])
        with pytest.raises(SignatureError, match=r"^argument state.x: got f32\[3\], compiled for f32\[8\]\n"):
            executor.run([X[:3]])
    with (
        chain_executor({"f": lambda x: (x, x)}) as executor,
        pytest.raises(FragmentError, match=r"TypeError: returned 2 arrays, 1 expected"),
    ):
        executor.run([X])


@pytest.mark.parametrize("issue", ISSUES)
def test_meshes_may_share_a_device(issue):
    """A weight that both meshes consume, given away by the user: neither sees the other's."""
    b = GraphBuilder()
    w = b.input("m0", "w", donated=True)
    v = b.transfer(w, "m1")
    for mesh, value in (("m0", w), ("m1", v)):
        for _ in range(3):
            (value,) = b.call("f", mesh, [value], donated=(0,))
        b.output(value)
    program = linearize(b.graph())
    f = jax.jit(lambda x: (x * 2,), donate_argnums=0)
    device = jax.devices()[0]
    devices = MeshDevices({"m0": [device], "m1": [device]})
    executables = {pair: Plain("f", f) for pair in program.executables}
    with Executor(program, executables, devices, RuntimeOptions(issue=issue)) as executor:
        for _ in range(5):
            results = executor.run([jax.device_put(X, device)])
            for array in results:
                np.testing.assert_array_equal(np.asarray(array), X * 8)


def test_one_array_passed_twice_cannot_be_donated():
    graph = one_f_one_b(1, 1)
    array = jax.device_put(X, jax.devices()[0])
    with make(graph) as executor:
        with pytest.raises(
            SignatureError, match=r"^arguments w0 and g0 are one array, and w0 is donated; pass a copy$"
        ):
            executor.run([array, array, X])
        with pytest.raises(
            SignatureError, match=r"^arguments w0 and x0 are one array, and w0 is donated; pass a copy$"
        ):
            executor.run([array, X, array])
        assert len(executor.run([X, X, X])) == 2  # host arrays are copied


@pytest.mark.parametrize("issue", ISSUES)
def test_meshes_of_several_devices_reshard_and_park_in_host_memory(issue):
    """m0 has two devices and m1 one; a residual waits in host memory until it is needed."""
    b = GraphBuilder(shape=(4, 6))
    rows, columns = '[{"x"}, {}]', '[{}, {"x"}]'
    x = b.input("m0", "x", sharding=rows)
    (y,) = b.call("scale", "m0", [x])
    b.types[y] = b.types[x]
    parked = b.transfer(y, "m0", sharding=rows, memory_kind="pinned_host")
    (z,) = b.call("shift", "m1", [b.transfer(y, "m1")])
    back = b.transfer(z, "m0", sharding=columns)
    (w,) = b.call("join", "m0", [b.transfer(parked, "m0", sharding=rows), back])
    b.types[w] = b.types[x]
    b.output(w)
    program = linearize(b.graph())
    devices = MeshDevices({"m0": Mesh(np.array(jax.devices()[:2]), ("x",)), "m1": jax.devices()[2:3]})
    out = devices.sharding(b.types[x])
    executables = {
        ("m0", "scale"): Plain("scale", jax.jit(lambda x: (x * 2,), out_shardings=(out,))),
        ("m1", "shift"): Plain("shift", jax.jit(lambda y: (y + 1,))),
        ("m0", "join"): Plain("join", jax.jit(lambda y, z: (y * z,), out_shardings=(out,))),
    }
    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    with Executor(program, executables, devices, RuntimeOptions(issue=issue)) as executor:
        for _ in range(3):
            (result,) = executor.run([host])
            np.testing.assert_array_equal(np.asarray(result), host * 2 * (host * 2 + 1))
            assert result.sharding.is_equivalent_to(out, 2)


@pytest.mark.parametrize("issue", ISSUES)
def test_a_trace_of_the_profiler_names_fragment_mesh_and_microbatch(issue, tmp_path):
    graph = one_f_one_b(2, 3)
    with make(graph, issue=issue) as executor:
        executor.run(random_inputs(graph))
        with jax.profiler.trace(tmp_path):
            executor.run(random_inputs(graph))
            executor.synchronize()
        streams = executor.program.streams
    runs = [(s.mesh, op) for s in streams for op in s.instructions if isinstance(op, Run)]
    (path,) = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [(e.name, dict(e.stats)) for plane in planes for line in plane.lines for e in line.events]
    found = [facts for _, facts in events if "fragment" in facts]
    assert sorted((f["mesh"], f["fragment"], str(f.get("microbatch"))) for f in found) == sorted(
        (mesh, op.executable, str(op.microbatch)) for mesh, op in runs
    )
    assert any(f.get("microbatch") for f in found)
    assert {int(f["step"]) for f in found} == {1}
    for mesh, op in runs:
        assert f"{op.executable} {task_text(op)} on {mesh}" in {name for name, _ in events}


@pytest.mark.parametrize("issue", ISSUES)
def test_a_signal_handler_within_a_step_waits_for_it_or_is_refused_and_never_hangs(issue):
    """The usual handler of a preemption; the signal comes while a fragment is issued."""
    seen = []

    def handler(*_):
        executor.synchronize()
        seen.append("waited")
        for forbidden in (lambda: executor.run([np.ones(8, np.float32)]), executor.close):
            with pytest.raises(ProgramError, match="was begun by a signal handler"):
                forbidden()
        seen.append("refused")

    def signalled(x):
        if len(seen) < 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return (x + 1,)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with chain_executor({"g": signalled}, issue=issue) as executor:
            results = [executor.run([np.ones(8, np.float32)]) for _ in range(2)]
            executor.synchronize()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["waited", "refused"]
    for (result,) in results:
        np.testing.assert_array_equal(result, np.full(8, 4, np.float32))
