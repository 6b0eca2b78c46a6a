"""Timelines as a trace that Perfetto and chrome://tracing open.

Constraints of the readers, which drop slices and arrows otherwise:

* Slices of one track nest or do not overlap; so transfers that overlap are drawn on tracks of their own, and
  times are whole microseconds, rounded once for each begin and each end, which no reader rounds again.
* The slice from which an arrow goes comes before the one to which it goes, in time or else in the file.
  Both have its number (`bind_id`).  Events `s` and `f` would bind to slices that are open at their time: one
  without a duration never is.
* Processes and threads are numbered from 1, every thread of the file differently: 0 is the idle thread of
  Linux, and some readers find threads by their number alone.

Source: src/trace_processor/importers/json of Perfetto.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from mpmd.scheduling.timeline import Span, Timeline

Event = dict[str, Any]


def chrome_trace(*timelines: Timeline) -> str:
    """One JSON document for one timeline, or several side by side (predicted and measured).

    A process per timeline and mesh.  It has a track for the mesh's computations, tracks for its sends to
    each mesh and its receives from each, and a counter of its bytes.  A transfer is drawn where it is sent
    and where it is received, with an arrow from one to the other.  Idle spans are left out: they are visible.
    """
    writer = _Writer()
    for timeline in timelines:
        writer.add(timeline, timeline.title if len(timelines) > 1 else "")
    # sends before receives of the same instant
    events = sorted(writer.events, key=lambda event: (event["ts"], "flow_in" in event))
    return json.dumps(
        {"traceEvents": [*writer.names, *events], "displayTimeUnit": "ms"}, separators=(",", ":")
    )


class _Writer:
    """Collects events, and the names of processes and threads."""

    def __init__(self) -> None:
        self.names: list[Event] = []
        self.events: list[Event] = []
        self._processes, self._threads, self._flows = (itertools.count(1) for _ in range(3))

    def add(self, timeline: Timeline, title: str) -> None:
        between = (s for s in timeline.transfers if {s.mesh, s.peer} <= set(timeline.meshes))
        flows = {id(span): next(self._flows) for span in between}  # a copy to host memory has one end here
        for mesh in timeline.meshes:
            process = next(self._processes)
            self._name("process_name", process, 0, f"{title}: {mesh}" if title else mesh)
            self.names.append(
                {**self.names[-1], "name": "process_sort_index", "args": {"sort_index": process}}
            )
            self._track("compute", process, timeline.compute(mesh))
            for peer, spans in _by_peer(timeline, mesh, sends=True):
                self._transfers(f"to {peer}", process, spans, flows, "flow_out")
            for peer, spans in _by_peer(timeline, mesh, sends=False):
                self._transfers(f"from {peer}", process, spans, flows, "flow_in")
            self._memory(timeline, mesh, process)

    def _transfers(
        self, title: str, process: int, spans: Sequence[Span], flows: dict[int, int], side: str
    ) -> None:
        tracks = _tracks(spans)
        for number, track in enumerate(tracks, 1):
            events = self._track(f"{title} ({number})" if len(tracks) > 1 else title, process, track)
            for span, event in zip(track, events, strict=True):
                if id(span) in flows:
                    event |= {"bind_id": hex(flows[id(span)]), side: True}

    def _track(self, title: str, process: int, spans: Sequence[Span]) -> list[Event]:
        thread = next(self._threads)
        self._name("thread_name", process, thread, title)
        slices = [{**_slice(span), "pid": process, "tid": thread} for span in spans]
        self.events += slices
        return slices

    def _memory(self, timeline: Timeline, mesh: str, process: int) -> None:
        for memory in timeline.memory:
            if memory.mesh == mesh and memory.peak_bytes:
                for seconds, sizes in memory.samples:
                    held = dict(zip(memory.categories, sizes, strict=True))
                    event = {"ph": "C", "name": "bytes", "pid": process, "ts": _us(seconds), "args": held}
                    self.events.append(event)

    def _name(self, kind: str, process: int, thread: int, name: str) -> None:
        self.names.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})


def _by_peer(timeline: Timeline, mesh: str, *, sends: bool) -> Iterator[tuple[str, list[Span]]]:
    """The transfers of a mesh by the mesh at the other end, each by start."""
    ends = [(s.mesh, s.peer, s) if sends else (s.peer, s.mesh, s) for s in timeline.transfers]
    here = [(peer, span) for at, peer, span in ends if at == mesh]
    for name in dict.fromkeys(peer for peer, _ in here):
        yield name, [span for peer, span in here if peer == name]


def _tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in order of begin, on as few tracks as keep those of one track from overlapping."""
    tracks: list[list[Span]] = []
    for span in spans:
        free = (track for track in tracks if _us(track[-1].end_s) <= _us(span.start_s))
        track = next(free, None)
        if track is None:
            tracks.append([span])
        else:
            track.append(span)
    return tracks


def _slice(span: Span) -> Event:
    args: Event = {}
    if span.task is not None:
        args = {"stage": span.task.stage, "microbatch": span.task.microbatch, "phase": span.task.phase.value}
    if span.nbytes:
        args["bytes"] = span.nbytes
    if span.source:
        args["source"] = span.source
    if span.note:
        args["note"] = span.note
    begin, end = _us(span.start_s), _us(span.end_s)
    return {"ph": "X", "name": span.name, "cat": span.kind, "ts": begin, "dur": end - begin, "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
