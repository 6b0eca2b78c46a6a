"""Seconds of the fragments and transfers of a program, each measured by itself."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpmd.brief import brief
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.measure.step_trace import MeasuredSpan, StepRecorder, spans_of
from mpmd.runtime.processes.part import Part
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.order import messages
from mpmd.runtime.program.streams import Copy, Program, Recv, Run, Send, between_memories
from mpmd.runtime.run.executor import Executor
from mpmd.runtime.run.interpreter import BoundCall, BoundInstruction, Observer, StepState
from mpmd.runtime.run.waiting import failure_of

_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class ProgramCosts:
    """Seconds of the parts of a step.

    Attributes:
        fragments: of each fragment, by name.
        transfers: of each kind of message or copy to or from host memory: from one buffer type to another.
        call_s: of the host for one call of a fragment and its messages.  The threads of all meshes share one
            interpreter, so that the calls of a step come one after the other.
    """

    fragments: Mapping[str, float]
    transfers: Mapping[tuple[BufferType, BufferType], float] = dataclasses.field(default_factory=dict)
    call_s: float = 0.0

    __repr__ = brief

    def run_s(self, fragment: str) -> float:
        """Seconds of one run of a fragment; 1 if it is not known."""
        return self.fragments.get(fragment, 1.0)

    def message_s(self, kinds: tuple[BufferType, BufferType]) -> float:
        """Seconds of one message or copy; 0 if its kind is not known."""
        return self.transfers.get(kinds, 0.0)


class OneAtATime(Observer):
    """Observes a step that one thread issues, and waits for everything: each fragment runs alone."""

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        """Waits for a call; a failure is reported by the executor."""
        for slot in call.outputs:
            failure_of(frame.slots[slot])

    def calling(self, call: BoundCall, frame: StepState) -> None:
        """Waits for the arguments of a call, so that its time includes no message."""
        for slot in call.inputs:
            failure_of(frame.slots[slot])


class HostClock:
    """CPU seconds of the issuing thread, those of observers left out.

    Attributes:
        stop: the first observer of the step.
        go: the last one.
    """

    def __init__(self) -> None:
        """Starts at 0; time before the first instruction does not count."""
        self.stop, self.go = _EachTime(self._stop), _EachTime(self._go)
        self._samples: dict[tuple[str, str], list[float]] = {}
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """From the first instruction to the last.

        Each kind counts with its median: the first of a kind takes several times as long.
        """
        return sum(len(samples) * statistics.median(samples) for samples in self._samples.values())

    def _stop(self, event: str, kind: str) -> None:
        if self._since is not None:
            self._samples.setdefault((event, kind), []).append(time.thread_time() - self._since)

    def _go(self, event: str, kind: str) -> None:
        self._since = time.thread_time()


class _EachTime(Observer):
    """Calls a function with each event and the kind of its instruction."""

    def __init__(self, function: Callable[[str, str], None]) -> None:
        self._function = function

    def calling(self, call: BoundCall, frame: StepState) -> None:
        self._function("calling", "call")

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        self._function("ran", "call")

    def issued(self, instruction: BoundInstruction, frame: StepState) -> None:
        self._function("issued", type(instruction).__name__)


def measure_costs(
    executor: Executor | Part, devices: MeshDevices, inputs: Sequence[Any], recorder: StepRecorder
) -> tuple[list[Any], ProgramCosts]:
    """Runs one step fragment by fragment; its flat results, and the median seconds of each fragment.

    Fragments that run at the same time may be slower: meshes that share cores slow each other down.  Several
    processes do not wait for each other's fragments, and measure messages in the step itself.

    Raises:
        FragmentError: a fragment failed.
        PeerError: another process failed.
    """
    clock = HostClock()
    with recorder:
        observers = [clock.stop, recorder, OneAtATime(), clock.go]
        results = executor.run(inputs, observers=observers, one_by_one=True)
    executor.synchronize()
    program = executor.program
    if not isinstance(executor, Part):
        runs = sum(isinstance(op, Run) for stream in program.streams for op in stream.instructions)
        call_s = clock.seconds / max(1, runs)
        return results, ProgramCosts(_medians(recorder.spans), transfer_seconds(program, devices), call_s)
    spans = spans_of(program, executor.gathered_times("costs", recorder.times)[0])
    return results, ProgramCosts(_medians(spans), _message_seconds(program, spans))


def _medians(spans: Sequence[MeasuredSpan]) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    for span in spans:
        if span.kind == "run":
            samples.setdefault(span.name, []).append(span.end_s - span.start_s)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _message_seconds(
    program: Program, spans: Sequence[MeasuredSpan]
) -> dict[tuple[BufferType, BufferType], float]:
    """The median seconds of every kind of message, from the end of the run that produced it."""
    number = {stream.mesh: s for s, stream in enumerate(program.streams)}
    sends = {message.recv: message.send for pair in messages(program) for message in pair}
    samples: dict[tuple[BufferType, BufferType], list[float]] = {}
    for span in spans:
        if span.kind == "transfer":
            ends = sends[number[span.mesh], span.at], (number[span.mesh], span.at)
            kinds = [
                program.streams[s].buffers[op.buffer].type
                for s, at in ends
                if isinstance(op := program.streams[s].instructions[at], (Send, Recv))
            ]
            samples.setdefault((kinds[0], kinds[1]), []).append(span.end_s - span.start_s)
    return {kinds: statistics.median(seconds) for kinds, seconds in samples.items()}


def transfer_seconds(program: Program, devices: MeshDevices) -> dict[tuple[BufferType, BufferType], float]:
    """The median seconds of every kind of message or copy between memories, from ready to ready array."""
    seconds: dict[tuple[BufferType, BufferType], float] = {}
    for stream in program.streams:
        for op in stream.instructions:
            if isinstance(op, Send):
                kinds = stream.buffers[op.buffer].type, program.channels[op.channel].types[op.sequence]
            elif isinstance(op, Copy) and (between := between_memories(op, stream)):
                kinds = between
            else:
                continue
            if kinds not in seconds:
                seconds[kinds] = _copy_seconds(devices, *kinds)
    return seconds


def _copy_seconds(devices: MeshDevices, source: BufferType, target: BufferType) -> float:
    copy = devices.copier(source, target)
    array = devices.placer(source, "message", fresh=False)(np.zeros(source.shape, np.dtype(source.dtype)))
    array.block_until_ready()
    seconds = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        copy(array).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
