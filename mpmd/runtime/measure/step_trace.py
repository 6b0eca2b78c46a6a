"""Measured times of a step: spans that are written where the work runs.

A fragment that has a `Timer`, as native ones do, writes its begin and end itself.  For any other, stamps are
started around it: of its inputs from elsewhere before it, of a result after it.  The programs of a device run
in the order in which they were started, so that a stamp takes the time between two fragments: on CPUs on the
threads that run them, where a thread of Python that waits for results would be woken milliseconds late, and
on GPUs on the stream on which it computes.

Messages are received before the fragments that need them.  On CPUs they are stamped in an order of their own.
On GPUs a stamp would make the stream wait for the message, so a `Watcher` waits for them instead: a thread of
the host, which sees them late by about 0.1 ms; its cores are free for Python there.  Devices without stamps
are watched altogether: see `watchers`.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Container, Iterator, Mapping
from typing import Any, Protocol

from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.order import Node, messages
from mpmd.runtime.program.streams import Program, Recv, Run, Send, Stream, donated_buffers, reads, writes
from mpmd.runtime.run.interpreter import (
    BoundCall,
    BoundCopy,
    BoundFeed,
    BoundInstruction,
    BoundRecv,
    BoundSend,
    FragmentExecutable,
    Observer,
    StepState,
    Timer,
)
from mpmd.runtime.run.waiting import failure_of
from mpmd.support.execution_log import Execution, TimeLog


@dataclasses.dataclass(slots=True)
class Sighting:
    """An instruction of a mesh: when it was issued, its handle, and when that was ready."""

    at: int
    issued: float
    handle: Any = None
    end: float = 0.0


class Watcher:
    """Waits for handles in order and records when they arrive."""

    def __init__(self, mesh: str) -> None:
        self.sightings: list[Sighting] = []
        self._queue: queue.SimpleQueue[Sighting | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"mpmd-watch-{mesh}", daemon=True)
        self._thread.start()

    def add(self, sighting: Sighting) -> None:
        """Waits for another one, after those before."""
        self._queue.put(sighting)

    def wait(self) -> None:
        """Returns when everything added so far has arrived."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()

    def close(self, wait: bool = True) -> None:
        """Ends the thread after what it waits for; with `wait` once it has ended."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _watch(self) -> None:
        while (sighting := self._queue.get()) is not None:
            if isinstance(sighting, threading.Event):
                sighting.set()
                continue
            failure_of(sighting.handle)  # a failure is reported by the executor; here it is only an end
            sighting.end, sighting.handle = time.perf_counter(), None
            self.sightings.append(sighting)


def consumed_receives(stream: Stream) -> list[int]:
    """Positions of receives whose buffer a later run consumes: such an array cannot be waited for."""
    consumed = {b for op in stream.instructions for b in donated_buffers(op)}
    return [at for at, op in enumerate(stream.instructions) if isinstance(op, Recv) and op.buffer in consumed]


Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of `time.perf_counter`, by (mesh, position).

    Attributes:
        runs: when each run began and ended.
        arrivals: when each received message was ready.
    """

    runs: Mapping[tuple[str, int], Interval]
    arrivals: Mapping[tuple[str, int], float]


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """An interval of time on a mesh; seconds of `time.perf_counter`.

    Attributes:
        mesh: its mesh; for a transfer, the receiver.
        name: the executable; for a transfer, the sending mesh.
        kind: "run" or "transfer".
        start_s, end_s: begin and end; a transfer begins when its value is ready.
        at: position in the stream of the mesh.
    """

    mesh: str
    name: str
    kind: str
    start_s: float
    end_s: float
    at: int


class StepRecorder(Observer, Protocol):
    """Observes one step: the one that runs inside its `with`.

    Attributes:
        times: afterwards when each run began and ended, and when each message was ready.
        spans: the same as spans, afterwards.
        unseen: executables without known times, afterwards.
        note: how true the times are, afterwards; "" for the host's clock.
    """

    times: StepTimes
    spans: tuple[MeasuredSpan, ...]
    unseen: tuple[str, ...]
    note: str

    def __enter__(self) -> object:
        """Begins."""

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Waits until everything that was issued has ended."""


class Stamper(Protocol):
    """Writes stamps: entries in a log, on each device of an array, when the array is ready."""

    @property
    def ordered_apart(self) -> bool:
        """Whether there is `stamp_in_own_order`."""

    def log(self, mesh: str, room: int) -> TimeLog:
        """An empty log for a mesh, with room for so many entries of each of its devices."""

    def marks(self, mesh: str, log: TimeLog, keys: list[int]) -> dict[int, Any]:
        """Arguments for stamps of a mesh that write these keys."""

    def stamp(self, mark: Any, array: Any) -> list[Any]:
        """Starts stamps of an array; arrays that are ready when these are written."""

    def stamp_in_own_order(self, number: int, mark: Any, array: Any) -> list[Any]:
        """The same, ordered only among stamps of that number; none where that is not supported."""


_abandoned: list[TimeLog] = []
"""Logs of steps that ended with an error: issued programs may still write to them."""


class TraceRecorder:
    """Observes one step of a program on devices that have stamps.

    ```
    with TraceRecorder(program, executables, stamps) as recorder:
        executor.run(inputs, observers=[recorder])
    recorder.spans
    ```
    """

    def __init__(
        self,
        program: Program,
        executables: Mapping[tuple[str, str], FragmentExecutable],
        stamps: Stamper,
        one_by_one: bool = False,
    ) -> None:
        """Takes the executor's arguments, the writer of stamps, and whether something waits for each call."""
        self.program = program
        self.times = StepTimes({}, {})
        self.spans: tuple[MeasuredSpan, ...] = ()
        self.unseen: tuple[str, ...] = ()
        self.note = ""
        self._meshes = {s.mesh: _MeshRecord(s, executables, stamps, one_by_one) for s in program.streams}

    def calling(self, call: BoundCall, frame: StepState) -> None:
        """Stamps the inputs of the call, unless it has a timer or no inputs."""
        self._meshes[call.mesh].begin(call, frame)

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        """Stamps a result of the call, likewise, once its messages are sent."""
        self._meshes[call.mesh].end(call, frame, issued)

    def issued(self, instruction: BoundInstruction, frame: StepState) -> None:
        """Stamps a message, and a call whose last one was sent.

        Waits for an argument, so that the step begins when all are there.
        """
        if isinstance(instruction, BoundFeed):
            failure_of(frame.slots[instruction.buffer])
        elif isinstance(instruction, (BoundRecv, BoundCopy)):
            self._meshes[instruction.mesh].expect(instruction, frame)
        elif isinstance(instruction, BoundSend):
            self._meshes[instruction.mesh].passed(instruction.at)

    def __enter__(self) -> TraceRecorder:
        for record in self._meshes.values():
            record.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        records = list(self._meshes.values())
        for record in records:
            record.close(wait=kind is None)
        if kind is not None:
            _abandoned.extend(record.log for record in records)
            return
        runs: dict[tuple[str, int], Interval] = {}
        arrivals: dict[tuple[str, int], float] = {}
        for record in records:
            seen, arrived = record.times()
            runs |= {(record.mesh, at): interval for at, interval in seen.items()}
            arrivals |= {(record.mesh, at): time for at, time in arrived.items()}
        self.unseen = tuple(dict.fromkeys(name for record in records for name in record.unseen))
        if error := max((record.log.error_s for record in records), default=0.0):
            self.note = f", clocks of the devices known within {error * 1e6:.0f} µs"
        self.times = StepTimes(runs, arrivals)
        self.spans = spans_of(self.program, self.times)


class _MeshRecord:
    """Times of one mesh.

    The key of a stamp is twice the position of its instruction, plus one for the end of a call.
    """

    def __init__(
        self,
        stream: Stream,
        executables: Mapping[tuple[str, str], FragmentExecutable],
        stamps: Stamper,
        one_by_one: bool,
    ) -> None:
        self.mesh, self._stamps = stream.mesh, stamps
        self.unseen: list[str] = []
        self._timers: dict[int, Timer] = {}
        self._stamped: set[int] = set()
        self._immediate: set[int] = set()
        self._received: list[int] = []
        keys = []
        for at, op in enumerate(stream.instructions):
            if isinstance(op, Recv):
                self._received.append(at)
                keys.append(2 * at)
            elif isinstance(op, Run):
                executable = executables[stream.mesh, op.executable]
                if getattr(executable, "immediate", False):
                    self._immediate.add(at)
                elif (timer := getattr(executable, "timer", None)) is not None:
                    self._timers[at] = timer
                else:
                    keys += [2 * at, 2 * at + 1]
                    self._stamped.add(at)
        reads_of_runs = sum(len(op.inputs) + 1 for op in stream.instructions if isinstance(op, Run))
        self._keys, self._entries = keys, reads_of_runs + len(keys) + 2 * len(self._timers)
        self._calls: list[tuple[BoundCall, float]] = []
        self._consumed = set() if stamps.ordered_apart else {*consumed_receives(stream)}
        self._watcher: Watcher | None = None
        self._awaited: set[int] = set()  # slots of arrays from elsewhere that no call has waited for
        self._handles: list[Any] = []
        self._ended: Any = None  # result of the last call
        self._last_sends = (
            {at: at for at in self._stamped} if one_by_one else _last_sends(stream, self._stamped)
        )

    def open(self) -> None:
        self.log = self._stamps.log(self.mesh, self._entries)
        if self._received and not self._stamps.ordered_apart:
            self._watcher = Watcher(self.mesh)
        self._marks = self._stamps.marks(self.mesh, self.log, self._keys)
        for timer in self._timers.values():
            timer.write_to(self.log)

    def expect(self, instruction: BoundRecv | BoundCopy, frame: StepState) -> None:
        self._awaited.add(instruction.buffer)
        if not isinstance(instruction, BoundRecv):
            return
        mark, array = self._marks[2 * instruction.at], frame.slots[instruction.buffer]
        if self._watcher is None:
            self._handles += self._stamps.stamp_in_own_order(instruction.channel + 1, mark, array)
        elif instruction.at not in self._consumed:
            self._watcher.add(Sighting(instruction.at, time.perf_counter(), array))

    def begin(self, call: BoundCall, frame: StepState) -> None:
        arrived = [slot for slot in dict.fromkeys(call.inputs) if slot in self._awaited]
        self._awaited.difference_update(arrived)
        if call.at in self._stamped:
            for slot in arrived or call.inputs[:1]:
                self._handles += self._stamps.stamp(self._marks[2 * call.at], frame.slots[slot])

    def end(self, call: BoundCall, frame: StepState, issued: float) -> None:
        self._calls.append((call, issued))
        if call.handle is not None:
            handle = call.pending.unfinished[-1].handle
        elif call.outputs and call.at in self._stamped:  # consumed later: it is stamped before
            handle = frame.slots[call.outputs[0]]
        else:
            return
        if call.at in self._stamped:
            self._ended = handle
            self.passed(call.at)
        else:
            self._handles.append(handle)

    def passed(self, at: int) -> None:
        """Stamps the end of a call after its messages: stamped before, they leave after the next call."""
        if (call := self._last_sends.get(at)) is not None:
            self._handles += self._stamps.stamp(self._marks[2 * call + 1], self._ended)
            self._ended = None

    def close(self, wait: bool) -> None:
        for handle in self._handles if wait else ():
            failure_of(handle)  # reported by the executor; here it is only an end
        for timer in self._timers.values():
            timer.write_to(None)
        self._handles.clear()
        if self._watcher is not None:
            self._watcher.close(wait=wait)

    def times(self) -> tuple[dict[int, Interval], dict[int, float]]:
        """When each run began and ended, and when each message was ready, by position."""
        by_key: dict[int, dict[int, list[Execution]]] = {}
        for entry in self.log.entries():
            by_key.setdefault(entry.key, {}).setdefault(entry.device, []).append(entry)
        counts: dict[int, int] = {}
        for timer in self._timers.values():
            counts[timer.key] = counts.get(timer.key, 0) + 1
        runs: dict[int, Interval] = {}
        number = dict.fromkeys(counts, 0)
        clock = 0.0
        for call, issued in self._calls:
            interval = None
            if call.at in self._immediate:
                interval = (max(clock, issued),) * 2
            elif call.at in self._stamped:
                begun, ended = by_key.get(2 * call.at), by_key.get(2 * call.at + 1)
                interval = _between(begun, ended, max(clock, issued) if begun is None else issued)
            else:
                key = self._timers[call.at].key
                devices = list(by_key.get(key, {}).values())
                if devices and all(len(of_device) == counts[key] for of_device in devices):
                    mine = [of_device[number[key]] for of_device in devices]
                    interval = min(e.begin_s for e in mine), max(e.end_s for e in mine)
                number[key] += 1
            if interval is None:
                self.unseen.append(call.op.executable)
            else:
                runs[call.at] = interval
                clock = max(clock, interval[1])
        arrivals = {at: _latest(by_key[2 * at]) for at in self._received if 2 * at in by_key}
        if self._watcher is not None:
            arrivals = {seen.at: seen.end for seen in self._watcher.sightings}
        return runs, arrivals


def _last_sends(stream: Stream, calls: Container[int]) -> dict[int, int]:
    """The calls by the position of the last send that follows, before the next call; by their own if none."""
    last_by_stream: dict[int, int] = {}
    last: tuple[int, int] | None = None
    for at, op in enumerate(stream.instructions):
        if isinstance(op, Run):
            last_by_stream.update([last] if last else [])
            last = (at, at) if at in calls else None
        elif isinstance(op, Send) and last:
            last = (at, last[1])
    last_by_stream.update([last] if last else [])
    return last_by_stream


def stamped_types(
    program: Program,
    executables: Mapping[tuple[str, str], FragmentExecutable],
    messages: bool = True,
) -> Iterator[BufferType]:
    """The types of the buffers that may be stamped.

    They are results of fragments without a timer, the token of such a fragment, too, if it has one, and with
    `messages` the arrays of messages.
    """
    for stream in program.streams:
        for op in stream.instructions:
            if isinstance(op, Recv) and messages:
                yield stream.buffers[op.buffer].type
            elif isinstance(op, Run):
                executable = executables[stream.mesh, op.executable]
                if getattr(executable, "timer", None) is None:
                    yield from (stream.buffers[b].type for b in (*op.inputs, *op.outputs))
                    if getattr(executable, "has_token", False):
                        yield BufferType((), "int8", stream.mesh)


def _between(
    begun: Mapping[int, list[Execution]] | None, ended: Mapping[int, list[Execution]] | None, issued: float
) -> Interval | None:
    """From the first device that could begin, once it was issued, to the last that had ended.

    A fragment may have no inputs.  The stamps of an idle device run at once, before the call is issued.
    """
    if not ended:
        return None
    begin = min((max(e.begin_s for e in of) for of in begun.values()), default=0.0) if begun else 0.0
    return max(begin, issued), _latest(ended)


def _latest(stamps: Mapping[int, list[Execution]]) -> float:
    return max(entry.end_s for of_device in stamps.values() for entry in of_device)


def spans_of(program: Program, times: StepTimes) -> tuple[MeasuredSpan, ...]:
    """Spans of one step, sorted by begin.

    The runs of a mesh do not overlap: work that one of several devices begins before the others have ended
    counts from that end.  A message that a run needed was ready when that began, even if it was stamped
    later.

    Args:
        program: the program that ran.
        times: of its runs and messages.
    """
    number = {stream.mesh: s for s, stream in enumerate(program.streams)}
    runs = {(number[mesh], at): interval for (mesh, at), interval in times.runs.items()}
    arrivals = {(number[mesh], at): time for (mesh, at), time in times.arrivals.items()}
    sources = _message_sources(program)
    spans: list[MeasuredSpan] = []
    begins: dict[tuple[int, int], float] = {}  # of the first run that reads a buffer
    for s, stream in enumerate(program.streams):
        clock = 0.0
        for at, op in enumerate(stream.instructions):
            if isinstance(op, Run) and (s, at) in runs:
                start = max(clock, runs[s, at][0])
                clock = max(start, runs[s, at][1])
                spans.append(MeasuredSpan(stream.mesh, op.executable, "run", start, clock, at))
                for buffer in reads(op):
                    begins.setdefault((s, buffer), start)
    for (s, at), source in sources.items():
        stream, source_run = program.streams[s], runs.get(source)
        op = stream.instructions[at]
        assert isinstance(op, Recv)
        ends = [t for t in (arrivals.get((s, at)), begins.get((s, op.buffer))) if t is not None]
        if source_run is not None and ends:
            name = program.streams[source[0]].mesh
            end = max(source_run[1], min(ends))
            spans.append(MeasuredSpan(stream.mesh, name, "transfer", source_run[1], end, at))
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.mesh, span.name)))


def _message_sources(program: Program) -> dict[Node, Node]:
    """For each receive the run that produced its value, as (stream, position); relays are left out."""
    makers = []
    for stream in program.streams:
        run_of_buffer: dict[int, int] = {}
        for at, op in enumerate(stream.instructions):
            if isinstance(op, Run):
                run_of_buffer.update(dict.fromkeys(writes(op), at))
        makers.append(run_of_buffer)
    sources = {}
    for pair in messages(program):
        for message in pair:
            s, at = message.send
            (buffer,) = reads(program.streams[s].instructions[at])
            if buffer in makers[s]:
                sources[message.recv] = (s, makers[s][buffer])
    return sources
