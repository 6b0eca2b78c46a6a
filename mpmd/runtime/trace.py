"""When everything really ran: measured spans of one or more steps, and a trace file of them.

A watcher thread per mesh waits for the results of the mesh's calls and receives in the order of issue and
notes when they arrive.  The end of a call is that instant, late by about 0.1 ms.  Its begin is computed:
the latest of the end of the call before on the mesh, the arrival of what it reads from other meshes, and
its issue.  Steps that are not traced have no watchers and cost nothing.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpmd.runtime.instructions import Recv, Run, donated_buffers, reads, writes
from mpmd.runtime.interpreter import BoundCall, BoundInstruction, BoundRecv, Frame, failure_of
from mpmd.runtime.order import messages
from mpmd.runtime.program import Program, Stream


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """Something that took time on a mesh; seconds of `time.perf_counter`.

    Attributes:
        mesh: where it ran; for a transfer, where it arrived.
        name: the executable; for a transfer, the mesh it came from.
        kind: "run" or "transfer".
        stage, microbatch, phase: of the call; for a transfer, of the call that made what was sent.
        step: number of the step.
        start_s, end_s: begin and end.
        issued_s: when the call was issued.
        at: position in the stream of the mesh.
    """

    mesh: str
    name: str
    kind: str
    stage: int | None
    microbatch: int | None
    phase: str
    step: int
    start_s: float
    end_s: float
    issued_s: float
    at: int = -1


@dataclasses.dataclass(slots=True)
class _Record:
    at: int
    step: int
    issued: float
    handle: Any
    end: float = 0.0


class _Watcher:
    """Waits for handles in order and notes when they arrive."""

    def __init__(self, mesh: str) -> None:
        self.records: list[_Record] = []
        self._queue: queue.SimpleQueue[_Record | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"mpmd-watch-{mesh}", daemon=True)
        self._thread.start()

    def add(self, record: _Record) -> None:
        self._queue.put(record)

    def wait(self) -> None:
        """Returns when everything added so far has arrived."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (record := self._queue.get()) is not None:
            if isinstance(record, threading.Event):
                record.set()
                continue
            failure_of(record.handle)  # a failure is told by the executor; here it is only an end
            record.end, record.handle = time.perf_counter(), None
            self.records.append(record)


def _consumed_receives(stream: Stream) -> list[int]:
    """Positions of receives whose buffer a later run consumes: such an array cannot be waited for."""
    consumed = {b for op in stream.instructions for b in donated_buffers(op)}
    return [at for at, op in enumerate(stream.instructions) if isinstance(op, Recv) and op.buffer in consumed]


class TraceRecorder:
    """Observes steps of one program; a context manager, so that its watchers end.

    ```
    with TraceRecorder(program, devices.token) as recorder:
        executor.run(inputs, observers=[recorder])
    recorder.spans
    ```
    """

    def __init__(self, program: Program, token: Callable[[Any], Any]) -> None:
        """Takes the program, and a function that makes a tiny array which is ready when its argument is."""
        self.program = program
        self.spans: tuple[MeasuredSpan, ...] = ()
        self._token = token
        self._watchers = {stream.mesh: _Watcher(stream.mesh) for stream in program.streams}
        self._consumed_receives = {
            (stream.mesh, at) for stream in program.streams for at in _consumed_receives(stream)
        }

    def ran(self, call: BoundCall, frame: Frame, issued: float) -> None:
        """Notes a call."""
        if call.handle is not None:
            self._add(call, frame, issued, call.lane.unfinished[-1].handle)
        elif call.outputs:  # they will be consumed, and cannot be waited for
            self._add(call, frame, issued, self._token(frame.slots[call.outputs[0]]))

    def issued(self, instruction: BoundInstruction, frame: Frame) -> None:
        """Notes a receive."""
        if isinstance(instruction, BoundRecv):
            array = frame.slots[instruction.buffer]
            consumed = (instruction.mesh, instruction.at) in self._consumed_receives
            self._add(instruction, frame, time.perf_counter(), self._token(array) if consumed else array)

    def _add(self, instruction: BoundInstruction, frame: Frame, issued: float, handle: Any) -> None:
        self._watchers[instruction.mesh].add(_Record(instruction.at, frame.number, issued, handle))

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        for watcher in self._watchers.values():
            watcher.wait()
            watcher.close()
        self.spans = spans_of(
            self.program,
            {
                mesh: [(r.step, r.at, r.issued, r.end) for r in w.records]
                for mesh, w in self._watchers.items()
            },
        )


Stamp = tuple[int, int, float, float]
"""(step, position in the stream, time of issue, time of arrival)."""


def spans_of(program: Program, stamps: dict[str, Sequence[Stamp]]) -> tuple[MeasuredSpan, ...]:
    """Spans from the stamps of every mesh, sorted by step, then by begin."""
    sources = _message_sources(program)
    steps = sorted({stamp[0] for records in stamps.values() for stamp in records})
    spans: list[MeasuredSpan] = []
    for step in steps:
        arrived = {
            (s, at): end
            for s, stream in enumerate(program.streams)
            for number, at, _, end in stamps.get(stream.mesh, ())
            if number == step
        }
        for s, stream in enumerate(program.streams):
            previous = 0.0
            received: dict[int, float] = {}
            for number, at, issued, end in stamps.get(stream.mesh, ()):
                if number != step:
                    continue
                op = stream.instructions[at]
                if isinstance(op, Recv):
                    received[op.buffer] = end
                    made = sources.get((s, at))
                    if made is not None and made in arrived:
                        run = program.streams[made[0]].instructions[made[1]]
                        assert isinstance(run, Run)
                        name = program.streams[made[0]].mesh
                        spans.append(
                            _span(stream.mesh, name, "transfer", run, step, arrived[made], end, issued, at)
                        )
                elif isinstance(op, Run):
                    inputs = [received[b] for b in reads(op) if b in received]
                    begin = min(max([previous, issued, *inputs]), end)
                    spans.append(_span(stream.mesh, op.executable, "run", op, step, begin, end, issued, at))
                    previous = end
    return tuple(sorted(spans, key=lambda span: (span.step, span.start_s, span.mesh, span.name)))


def _span(
    mesh: str, name: str, kind: str, op: Run, step: int, start: float, end: float, issued: float, at: int
) -> MeasuredSpan:
    return MeasuredSpan(
        mesh, name, kind, op.stage, op.microbatch, op.phase, step, min(start, end), end, issued, at
    )


def _message_sources(program: Program) -> dict[tuple[int, int], tuple[int, int]]:
    """For each receive the run that made what it receives, as (stream, position); relays are left out."""
    makers = []
    for stream in program.streams:
        made: dict[int, int] = {}
        for at, op in enumerate(stream.instructions):
            if isinstance(op, Run):
                made.update(dict.fromkeys(writes(op), at))
        makers.append(made)
    sources = {}
    for pair in messages(program):
        for message in pair:
            s, at = message.send
            (buffer,) = reads(program.streams[s].instructions[at])
            if buffer in makers[s]:
                sources[message.recv] = (s, makers[s][buffer])
    return sources


def bubble_fraction(spans: Iterable[MeasuredSpan]) -> float:
    """The part of the time between the first begin and the last end in which meshes ran nothing."""
    runs = [span for span in spans if span.kind == "run"]
    if not runs:
        return 0.0
    meshes = {span.mesh for span in runs}
    whole = max(s.end_s for s in runs) - min(s.start_s for s in runs)
    busy = sum(s.end_s - s.start_s for s in runs)
    return max(0.0, 1.0 - busy / (whole * len(meshes))) if whole > 0 else 0.0


def chrome_trace(spans: Iterable[MeasuredSpan]) -> str:
    """JSON for Perfetto or chrome://tracing: a process per mesh, a row for runs and one for transfers."""
    spans = list(spans)
    origin = min((span.start_s for span in spans), default=0.0)
    numbers = {mesh: k for k, mesh in enumerate(sorted({span.mesh for span in spans}))}
    events: list[dict[str, Any]] = []
    for mesh, k in numbers.items():
        events.append({"ph": "M", "name": "process_name", "pid": k, "args": {"name": f"mesh {mesh}"}})
        for tid, name in enumerate(("fragments", "transfers")):
            events.append({"ph": "M", "name": "thread_name", "pid": k, "tid": tid, "args": {"name": name}})
    for span in spans:
        task = "" if span.microbatch is None else f" {span.microbatch}"
        transfer = span.kind == "transfer"
        events.append(
            {
                "ph": "X",
                "name": f"from {span.name}{task}" if transfer else f"{span.name}{task}",
                "cat": span.kind,
                "pid": numbers[span.mesh],
                "tid": int(transfer),
                "ts": round((span.start_s - origin) * 1e6, 3),
                "dur": round((span.end_s - span.start_s) * 1e6, 3),
                "args": {
                    "stage": span.stage,
                    "microbatch": span.microbatch,
                    "phase": span.phase,
                    "step": span.step,
                    "issued_us": round((span.issued_s - origin) * 1e6, 3),
                },
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)
