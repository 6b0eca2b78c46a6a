"""Timelines of a step: predicted from what its fragments cost, measured as it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpmd.runtime.channels.placement import Placement
from mpmd.runtime.executor import Executor
from mpmd.runtime.instructions import Recv, Run
from mpmd.runtime.order import messages
from mpmd.runtime.program import Program
from mpmd.runtime.trace import MeasuredSpan, TraceRecorder
from mpmd.runtime.verify import verify
from mpmd.scheduling.task import Phase, Task
from mpmd.scheduling.timeline import COMPUTE, TRANSFER, Span, Timeline


def predicted_timeline(
    program: Program,
    seconds: Mapping[str, float],
    meshes: Sequence[str],
    latency_s: float = 0.0,
    bytes_per_s: float = 0.0,
) -> Timeline:
    """When everything would run if each mesh ran its stream in order.

    Args:
        program: the streams.
        seconds: what each fragment takes, by name; those that are not named take 1.
        meshes: the order in which to show them.
        latency_s: what every transfer takes.
        bytes_per_s: how fast a transfer is beyond that; 0 for instant.
    """
    order = verify(program)
    sends = {
        (program.streams[m.recv[0]].mesh, m.recv[1]): m for channel in messages(program) for m in channel
    }
    ready: dict[tuple[str, int], float] = {}
    device = {stream.mesh: 0.0 for stream in program.streams}
    spans: list[Span] = []
    for s, at in order.nodes:
        stream = program.streams[s]
        op = stream.instructions[at]
        if isinstance(op, Run):
            start = max([device[stream.mesh], *(ready.get((stream.mesh, b), 0.0) for b in op.inputs)])
            end = device[stream.mesh] = start + seconds.get(op.executable, 1.0)
            ready.update({(stream.mesh, b): end for b in op.outputs})
            task = _task(op.stage, op.microbatch, op.phase)
            spans.append(Span(stream.mesh, op.executable, task, start, end, COMPUTE))
        elif isinstance(op, Recv):
            sender = program.streams[sends[stream.mesh, at].send[0]]
            sent = sender.instructions[sends[stream.mesh, at].send[1]]
            size = stream.buffers[op.buffer].type.bytes
            start = ready.get((sender.mesh, sent.buffer), 0.0)  # type: ignore[union-attr]
            end = start + latency_s + (size / bytes_per_s if bytes_per_s else 0.0)
            ready[stream.mesh, op.buffer] = end
            spans.append(
                Span(sender.mesh, "transfer", None, start, end, TRANSFER, peer=stream.mesh, nbytes=size)
            )
    return Timeline(tuple(spans), _shown(program, meshes), f"{program.name}, predicted")


def measured_timeline(
    executor: Executor, placement: Placement, leaves: Sequence[Any], meshes: Sequence[str]
) -> tuple[list[Any], Timeline]:
    """Runs one step with watchers on it; its flat results and what ran when."""
    with TraceRecorder(executor.program, placement.token) as recorder:
        results = executor.run(leaves, observers=[recorder])
    return results, timeline_of(executor.program, recorder.spans, meshes)


def timeline_of(program: Program, measured: Sequence[MeasuredSpan], meshes: Sequence[str]) -> Timeline:
    """Measured spans as a timeline that begins at 0."""
    begin = min((span.start_s for span in measured), default=0.0)
    spans = [
        Span(
            mesh=span.mesh if span.kind == "run" else span.name,
            name=span.name if span.kind == "run" else "transfer",
            task=_task(span.stage, span.microbatch, span.phase),
            start_s=span.start_s - begin,
            end_s=span.end_s - begin,
            kind=COMPUTE if span.kind == "run" else TRANSFER,
            peer="" if span.kind == "run" else span.mesh,
        )
        for span in measured
    ]
    return Timeline(tuple(spans), _shown(program, meshes), f"{program.name}, measured")


def _shown(program: Program, meshes: Sequence[str]) -> tuple[str, ...]:
    """The meshes that the program uses, in the order of the topology."""
    used = {stream.mesh for stream in program.streams}
    return tuple(mesh for mesh in meshes if mesh in used)


def _task(stage: int | None, microbatch: int | None, phase: str) -> Task | None:
    if microbatch is None or not phase:
        return None
    return Task(stage or 0, microbatch, Phase(phase))
