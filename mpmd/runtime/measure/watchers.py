"""Times observed from outside: for devices that leave the cores of the host to Python.

A watcher thread per mesh waits for the results of the mesh's calls and receives in the order of issue and
records when they arrive.  The end of a call is that instant, late by about 0.1 ms.  Its begin is computed:
the latest of the end of the call before on the mesh, the arrival of its inputs from other meshes, and
its issue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpmd.runtime.measure.step_trace import (
    Interval,
    MeasuredSpan,
    Sighting,
    StepTimes,
    Watcher,
    consumed_receives,
    spans_of,
)
from mpmd.runtime.program.streams import Program, Recv, Run, reads
from mpmd.runtime.run.interpreter import BoundCall, BoundInstruction, BoundRecv, Observer, StepState


class WatchingRecorder(Observer):
    """Observes one step with a thread per mesh; a `StepRecorder`."""

    def __init__(self, program: Program, token: Callable[[Any], Any], why: str = "") -> None:
        """Takes the program, a function whose tiny result is ready with its argument, and why it watches."""
        self.program = program
        self.times = StepTimes({}, {})
        self.spans: tuple[MeasuredSpan, ...] = ()
        self.unseen: tuple[str, ...] = ()
        self.note = f", times of the host, late by about 0.1 ms{why and f': {why}'}"
        self._token = token
        self._watchers: dict[str, Watcher] = {}
        self._consumed_receives = {
            (stream.mesh, at) for stream in program.streams for at in consumed_receives(stream)
        }

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        if call.handle is not None:
            self._add(call, issued, call.pending.unfinished[-1].handle)
        elif call.outputs:  # they will be consumed, and cannot be waited for
            self._add(call, issued, self._token(frame.slots[call.outputs[0]]))

    def issued(self, instruction: BoundInstruction, frame: StepState) -> None:
        if isinstance(instruction, BoundRecv):
            array = frame.slots[instruction.buffer]
            consumed = (instruction.mesh, instruction.at) in self._consumed_receives
            self._add(instruction, time.perf_counter(), self._token(array) if consumed else array)

    def _add(self, instruction: BoundInstruction, issued: float, handle: Any) -> None:
        self._watchers[instruction.mesh].add(Sighting(instruction.at, issued, handle))

    def __enter__(self) -> WatchingRecorder:
        self._watchers = {stream.mesh: Watcher(stream.mesh) for stream in self.program.streams}
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        for watcher in self._watchers.values():
            watcher.wait()
            watcher.close()
        sightings = {mesh: watcher.sightings for mesh, watcher in self._watchers.items()}
        self.times = times_of(self.program, sightings)
        self.spans = spans_of(self.program, self.times)


def times_of(program: Program, sightings: Mapping[str, Sequence[Sighting]]) -> StepTimes:
    """When runs began and ended, and when messages were ready, from the watcher of each mesh."""
    runs: dict[tuple[str, int], Interval] = {}
    arrivals: dict[tuple[str, int], float] = {}
    for stream in program.streams:
        previous = 0.0
        received: dict[int, float] = {}
        for sighting in sightings.get(stream.mesh, ()):
            at, end = sighting.at, sighting.end
            op = stream.instructions[at]
            if isinstance(op, Recv):
                received[op.buffer] = arrivals[stream.mesh, at] = end
            elif isinstance(op, Run):
                inputs = [received[b] for b in reads(op) if b in received]
                runs[stream.mesh, at] = min(max([previous, sighting.issued, *inputs]), end), end
                previous = end
    return StepTimes(runs, arrivals)
