from __future__ import annotations

import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from examples.workloads.sleeping import sleep
from mpmd.compile.backends.native_cpu.ffi import HostStamps
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.channels.stamps import Stamps
from mpmd.runtime.measure.step_trace import StepTimes, TraceRecorder, spans_of, stamped_types
from mpmd.runtime.measure.watchers import Sighting, WatchingRecorder, times_of
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.streams import Recv, Run
from mpmd.runtime.run.clients import made_devices
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from mpmd.runtime.run.interpreter import Observer
from mpmd.support.execution_log import ExecutionLog
from tests.support.pipeline_graphs import X, compiled, devices, random_inputs, sequential


def recorders(program, executables, place):
    """Both ways to record a step: from inside, and from outside."""
    stamps = Stamps(HostStamps(), place)
    stamps.prepare(stamped_types(program, executables))
    return TraceRecorder(program, executables, stamps), WatchingRecorder(program, place.token)


@pytest.mark.parametrize("issue", ["one-thread", "thread-per-mesh"])
def test_every_call_and_transfer_becomes_a_span(issue):
    graph = one_f_one_b(3, 4)
    program, place = linearize(graph), devices(3)
    inputs, executables = random_inputs(graph), compiled(program)
    want = sequential(graph, inputs)
    with Executor(program, executables, place, RuntimeOptions(issue=issue)) as executor:
        for recorder in recorders(program, executables, place):
            begin = time.perf_counter()
            with recorder:
                got = executor.run(inputs, observers=[recorder])
            end = time.perf_counter()
            for array, expected in zip(got, want, strict=True):
                np.testing.assert_allclose(np.asarray(array), expected, rtol=1e-5, atol=1e-6)
            assert recorder.unseen == ()
            assert all(begin <= s.start_s <= s.end_s <= end for s in recorder.spans)
            for stream in program.streams:
                check_stream(stream, [s for s in recorder.spans if s.mesh == stream.mesh])
    assert not [t for t in threading.enumerate() if t.name.startswith("mpmd-watch")]


def check_stream(stream, spans):
    """The spans of a mesh are its calls, in order and apart, and its messages, before what reads them."""
    runs = sorted((s for s in spans if s.kind == "run"), key=lambda s: s.at)
    calls = [op for op in stream.instructions if isinstance(op, Run)]
    assert [(s.name, stream.instructions[s.at]) for s in runs] == [(op.executable, op) for op in calls]
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(runs))
    transfers = {s.at: s for s in spans if s.kind == "transfer"}
    assert sorted(transfers) == [at for at, op in enumerate(stream.instructions) if isinstance(op, Recv)]
    for at, span in transfers.items():
        buffer = stream.instructions[at].buffer
        readers = [s.start_s for s in runs if buffer in stream.instructions[s.at].inputs]
        assert span.start_s == span.end_s or span.end_s <= min(readers, default=span.end_s)


def test_messages_leave_before_the_next_call():
    """A recorded step overlaps as any other: the end of a call is stamped after its messages."""
    b, pause_s = GraphBuilder(), 0.02
    x = b.input("m0")
    for microbatch in range(4):
        (y,) = b.call("f", "m0", [x], microbatch=microbatch, phase="F", stage=0)
        b.output(*b.call("h", "m1", [b.transfer(y, "m1")], microbatch=microbatch, phase="F", stage=1))
    program = linearize(b.graph())
    place = MeshDevices(made_devices({"m0": 1, "m1": 1}))
    square = np.eye(32, dtype=np.float32)  # XLA runs programs of fewer operations when they are called

    def body(x):
        y = jax.lax.optimization_barrier(square) @ square
        return (x + y[0, 0] + sleep(jnp.float32(pause_s), y),)

    bodies = dict.fromkeys("fh", (body, ()))
    executables = compiled(program, bodies)
    with Executor(program, executables, place) as executor:
        executor.run([X])
        executor.synchronize()
        recorder, _ = recorders(program, executables, place)
        with recorder:
            executor.run([X], observers=[recorder])
    runs = [s for s in recorder.spans if s.kind == "run"]
    assert len(runs) == 8
    assert all(s.end_s - s.start_s > 0.9 * pause_s for s in runs)
    assert min(s.start_s for s in runs if s.mesh == "m1") < max(s.start_s for s in runs if s.mesh == "m0")


class SlowHost(Observer):
    """Takes a while before each call."""

    def __init__(self):
        self.times = {}

    def calling(self, call, frame):
        time.sleep(0.01)
        self.times[call.mesh, call.at] = time.perf_counter()


def test_a_call_begins_once_it_is_issued():
    """An idle device writes the stamp of the inputs at once."""
    graph = one_f_one_b(2, 2)
    program, place = linearize(graph), devices(2)
    executables, host = compiled(program), SlowHost()
    recorder, _ = recorders(program, executables, place)
    with Executor(program, executables, place) as executor, recorder:
        executor.run(random_inputs(graph), observers=[recorder, host])
    runs = {(s.mesh, s.at): s.start_s for s in recorder.spans if s.kind == "run"}
    assert runs.keys() == host.times.keys()
    assert all(start >= host.times[call] for call, start in runs.items())


@pytest.mark.parametrize("count", [1, 2])
def test_stamps_wait_for_their_array_alone(count):
    """Behind a fragment that sleeps: of its result after it, of its argument at once, in an order apart."""
    place = MeshDevices({"m": jax.devices()[:count]})
    sharding = place.sharding(BufferType((4,), "float32", "m"))
    pause_s = 0.05
    slow = jax.jit(
        jax.shard_map(
            lambda x: x + sleep(x[0], x),
            mesh=place.meshes["m"],
            in_specs=jax.P(),
            out_specs=jax.P(),
            check_vma=False,
        )
    )
    x = jax.device_put(np.full(4, pause_s, np.float32), sharding)
    log, stamps = ExecutionLog(8), Stamps(HostStamps(), place)
    jax.block_until_ready([slow(x), *stamps.stamp(stamps.marks("m", ExecutionLog(2), [0])[0], slow(x))])
    marks = stamps.marks("m", log, [7, 8])
    begin = time.perf_counter()
    made = slow(x)
    pending = stamps.stamp_in_own_order(1, marks[8], x)
    jax.block_until_ready([*pending, *stamps.stamp(marks[7], made)])
    seen = {key: [e for e in log.entries() if e.key == key] for key in (7, 8)}
    assert [len(entries) for entries in seen.values()] == [count, count]
    assert len({e.device for e in seen[7]}) == count
    assert all(e.begin_s == e.end_s >= begin + pause_s for e in seen[7])
    assert max(e.end_s for e in seen[8]) < min(e.end_s for e in seen[7])


def test_a_full_log_only_counts():
    place = devices(1)
    x = jax.device_put(np.zeros(4, np.float32), jax.devices()[0])
    log, stamps = ExecutionLog(2), Stamps(HostStamps(), place)
    mark = stamps.marks(next(iter(place.meshes)), log, [3])[3]
    for _ in range(4):
        jax.block_until_ready(stamps.stamp(mark, x))
    assert (log.written, len(log.entries())) == (4, 2)


def two_meshes():
    """m0: f, g; m1: h of what f made; and where they stand."""
    b = GraphBuilder()
    (y,) = b.call("f", "m0", [b.input("m0")], microbatch=0, phase="F", stage=0)
    b.output(*b.call("g", "m0", [y], microbatch=0, phase="B", stage=0))
    b.output(*b.call("h", "m1", [b.transfer(y, "m1")], microbatch=0, phase="F", stage=1))
    program = linearize(b.graph())
    at = {
        type(op).__name__ + getattr(op, "executable", ""): (s, k)
        for s, stream in enumerate(program.streams)
        for k, op in enumerate(stream.instructions)
    }
    return program, at


def spans_in_short(program, times):
    return [(s.mesh, s.name, s.kind, s.start_s, s.end_s) for s in spans_of(program, times)]


def test_begins_are_computed_from_what_watchers_saw():
    program, at = two_meshes()
    sightings = {
        "m0": [Sighting(at["Runf"][1], 0.0, None, 2.0), Sighting(at["Rung"][1], 0.1, None, 5.0)],
        "m1": [Sighting(at["Recv"][1], 0.2, None, 3.0), Sighting(at["Runh"][1], 0.3, None, 4.5)],
    }
    assert spans_in_short(program, times_of(program, sightings)) == [
        ("m0", "f", "run", 0.0, 2.0),
        ("m0", "g", "run", 2.0, 5.0),
        ("m1", "m0", "transfer", 2.0, 3.0),
        ("m1", "h", "run", 3.0, 4.5),
    ]


def test_a_message_is_there_before_what_reads_it_and_runs_are_apart():
    program, at = two_meshes()
    f, g, h, recv = (
        ("m0", at["Runf"][1]),
        ("m0", at["Rung"][1]),
        ("m1", at["Runh"][1]),
        ("m1", at["Recv"][1]),
    )
    runs = {f: (1.0, 2.0), g: (1.9, 3.0), h: (2.5, 4.0)}
    assert spans_in_short(program, StepTimes(runs, {recv: 3.5})) == [
        ("m0", "f", "run", 1.0, 2.0),
        ("m0", "g", "run", 2.0, 3.0),
        ("m1", "m0", "transfer", 2.0, 2.5),
        ("m1", "h", "run", 2.5, 4.0),
    ]
    without = spans_in_short(program, StepTimes(runs, {}))  # where stamps have no order of their own
    assert ("m1", "m0", "transfer", 2.0, 2.5) in without
    del runs[f]
    assert [kind for _, _, kind, _, _ in spans_in_short(program, StepTimes(runs, {}))] == ["run", "run"]


def test_a_token_is_ready_when_its_array_is():
    place = devices(1)
    x = jax.device_put(np.ones((400, 400), np.float32), jax.devices()[0])
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda i, c: c @ x / 400, x))
    slow(x).block_until_ready()
    pending = slow(x)
    token = place.token(pending)
    early = token.is_ready()
    assert not early or pending.is_ready()
    token.block_until_ready()
    assert pending.is_ready()
