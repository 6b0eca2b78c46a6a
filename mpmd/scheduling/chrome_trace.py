"""Timelines as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from mpmd.scheduling.timeline import IDLE, Span, Timeline


def chrome_trace(*timelines: Timeline) -> str:
    """One JSON document for one timeline, or several side by side (predicted and measured).

    A process per timeline and mesh; in it a thread for what the mesh computes and one per mesh it sends to,
    and a counter for the bytes it holds.  Idle spans are left out: the reader sees them.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for timeline in timelines:
        for mesh in timeline.meshes:
            name = f"{timeline.title}: {mesh}" if timeline.title and len(timelines) > 1 else mesh
            events.append(_metadata("process_name", process, 0, name))
            events.append(
                {**_metadata("process_sort_index", process, 0, name), "args": {"sort_index": process}}
            )
            events += _mesh_events(timeline, mesh, process)
            process += 1
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _mesh_events(timeline: Timeline, mesh: str, process: int) -> list[dict[str, Any]]:
    events = [_metadata("thread_name", process, 0, "compute")]
    events += (_complete(span, process, 0) for span in timeline.compute(mesh))
    sent = [span for span in timeline.transfers if span.mesh == mesh and span.kind != IDLE]
    for thread, peer in enumerate(dict.fromkeys(span.peer for span in sent), 1):
        events.append(_metadata("thread_name", process, thread, f"to {peer}"))
        events += (_complete(span, process, thread) for span in sent if span.peer == peer)
    for memory in timeline.memory:
        if memory.mesh == mesh and memory.peak_bytes:
            for seconds, sizes in memory.samples:
                held = dict(zip(memory.categories, sizes, strict=True))
                events.append({"ph": "C", "name": "bytes", "pid": process, "ts": _us(seconds), "args": held})
    return events


def _complete(span: Span, process: int, thread: int) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if span.task is not None:
        args = {"stage": span.task.stage, "microbatch": span.task.microbatch, "phase": span.task.phase.value}
    if span.nbytes:
        args["bytes"] = span.nbytes
    if span.note:
        args["note"] = span.note
    return {
        "ph": "X", "name": span.name, "cat": span.kind, "pid": process, "tid": thread,
        "ts": _us(span.start_s), "dur": _us(span.seconds), "args": args,
    }  # fmt: skip


def _metadata(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
