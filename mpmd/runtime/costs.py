"""Seconds of the fragments and transfers of a program, each measured by itself."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.executor import Executor
from mpmd.runtime.graph import BufferType
from mpmd.runtime.instructions import Recv, Send
from mpmd.runtime.interpreter import BoundCall, Observer, StepState
from mpmd.runtime.order import messages
from mpmd.runtime.processes.part import Part
from mpmd.runtime.program import Program
from mpmd.runtime.trace import MeasuredSpan, StepRecorder, spans_of
from mpmd.runtime.waiting import failure_of

_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class ProgramCosts:
    """Seconds of the parts of a step.

    Attributes:
        fragments: of each fragment, by name.
        transfers: of each kind of message: from one buffer type to another.
    """

    fragments: Mapping[str, float]
    transfers: Mapping[tuple[BufferType, BufferType], float] = dataclasses.field(default_factory=dict)

    def run_s(self, fragment: str) -> float:
        """Seconds of one run of a fragment; 1 if it is not known."""
        return self.fragments.get(fragment, 1.0)

    def message_s(self, kinds: tuple[BufferType, BufferType]) -> float:
        """Seconds of one message; 0 if its kind is not known."""
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
    with recorder:
        results = executor.run(inputs, observers=[recorder, OneAtATime()], one_by_one=True)
    executor.synchronize()
    program = executor.program
    if not isinstance(executor, Part):
        return results, ProgramCosts(_medians(recorder.spans), transfer_seconds(program, devices))
    spans = spans_of(program, executor.gathered_times(recorder.times)[0])
    return results, ProgramCosts(_medians(spans), _message_seconds(program, spans))


def _medians(spans: Sequence[MeasuredSpan]) -> dict[str, float]:
    """The median seconds of each fragment."""
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
    """The median seconds of every kind of message, from a ready array to a ready array."""
    seconds: dict[tuple[BufferType, BufferType], float] = {}
    for stream in program.streams:
        for op in stream.instructions:
            if isinstance(op, Send):
                kinds = stream.buffers[op.buffer].type, program.channels[op.channel].types[op.sequence]
                if kinds not in seconds:
                    seconds[kinds] = _copy_seconds(devices, *kinds)
    return seconds


def _copy_seconds(devices: MeshDevices, source: BufferType, target: BufferType) -> float:
    copy = devices.copier(source, target)
    array = devices.placer(source, "message", fresh=False)(np.zeros(source.shape, np.dtype(source.dtype)))
    array.block_until_ready()
    found = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        copy(array).block_until_ready()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
