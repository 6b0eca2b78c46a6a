"""A timeline: spans of work on meshes, predicted or measured."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mpmd.brief import brief, bytes_text, card, counted, few
from mpmd.scheduling.table import Task

COMPUTE = "compute"
TRANSFER = "transfer"
IDLE = "idle"


@dataclass(frozen=True)
class Span:
    """An interval of time on a mesh.

    Attributes:
        mesh: name of the mesh; of a transfer, the mesh that sends, or its host memory, `m0#pinned_host`.
        name: of the task, fragment or transfer.
        task: the task it is or carries, if it belongs to one.
        start_s: seconds from the begin of the step.
        end_s: likewise.
        kind: ``compute``, ``transfer`` or ``idle``.
        peer: of a transfer, the mesh or host memory that receives; of an idle span in which the mesh waits
            for a message under way, the mesh that sent it.
        nbytes: of a transfer, its size; of a computation, the bytes on the mesh while it runs, if known.
        note: a remark; of an idle span, the reason of the wait.
        source: names and line of the user's model from which it comes, if known.
        with_forward: whether the task, a backward, computes a forward too.
        number: of the span within its step; negative if nothing refers to it.
        needs: the numbers of the spans whose results it reads.
    """

    mesh: str
    name: str
    task: Task | None
    start_s: float
    end_s: float
    kind: str = COMPUTE
    peer: str = ""
    nbytes: int = 0
    note: str = ""
    source: str = ""
    with_forward: bool = False
    number: int = -1
    needs: tuple[int, ...] = ()

    __repr__ = brief

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def critical_path(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The chain of spans to the last end of a step, each of which begins when the one before lets it.

    A computation begins when its mesh is free and all that it reads is there: before it comes whichever ended
    last.  A transfer begins when its value is made, or later, when its link is free.  Time between two spans
    of the path belongs to neither a mesh nor a link: it is the host's, or noise of the clocks.

    Args:
        spans: of one step; those that `needs` names but that are missing are passed over.
    """
    lanes: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        if span.kind != IDLE:
            lanes.setdefault((span.mesh, span.peer if span.kind == TRANSFER else ""), []).append(span)
    numbered = {span.number: span for lane in lanes.values() for span in lane if span.number >= 0}
    computed = [span for (_, peer), lane in lanes.items() if not peer for span in lane]
    if not computed or not numbered:
        return ()
    before: dict[int, Span] = {}
    for lane in lanes.values():
        lane.sort(key=lambda span: (span.start_s, span.end_s, span.number))
        before.update({id(later): earlier for earlier, later in itertools.pairwise(lane)})
    path = [max(computed, key=lambda span: span.end_s)]
    seen = {id(path[0])}
    while (last := _released_by(path[-1], before, numbered)) is not None and id(last) not in seen:
        path.append(last)
        seen.add(id(last))  # clocks of several devices may contradict each other
    return tuple(path[::-1])


def _released_by(span: Span, before: Mapping[int, Span], numbered: Mapping[int, Span]) -> Span | None:
    """The span whose end let another one begin."""
    earlier = before.get(id(span))
    needed = [numbered[number] for number in span.needs if number in numbered]
    made = max(needed, key=lambda one: one.end_s, default=None)
    if made is None or earlier is None:
        return made or earlier
    if span.kind == TRANSFER:
        waited = span.start_s - made.end_s > 1e-6 * abs(span.end_s)
        return earlier if waited else made
    return made if made.end_s > earlier.end_s else earlier


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of one mesh over time, by category.

    Attributes:
        mesh: its name.
        categories: names, in the order of the samples.
        samples: (seconds, bytes per category), at each change, in order; the first at the begin of the step.
        peak_activations: the maximum of (stage, microbatch) pairs between their forward and the end of their
            backward.
    """

    mesh: str
    categories: tuple[str, ...]
    samples: tuple[tuple[float, tuple[int, ...]], ...]
    peak_activations: int = 0

    @functools.cached_property
    def _peak(self) -> tuple[float, tuple[int, ...]]:
        return max(
            self.samples, key=lambda sample: sum(sample[1]), default=(0.0, (0,) * len(self.categories))
        )

    def __repr__(self) -> str:
        return (
            f"MemoryCurve of {self.mesh}: {counted(len(self.samples), 'sample')}, "
            f"at most {bytes_text(self.peak_bytes)}"
        )

    def at(self, seconds: float) -> int:
        """Bytes held just after a moment."""
        after = bisect.bisect_right(self.samples, seconds, key=lambda sample: sample[0])
        return sum(self.samples[after - 1][1]) if after else 0

    @property
    def peak_bytes(self) -> int:
        """The maximum of bytes held at once."""
        return sum(self._peak[1])

    @property
    def peak_time_s(self) -> float:
        """When the peak is first reached."""
        return self._peak[0]

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes per category at the peak."""
        return dict(zip(self.categories, self._peak[1], strict=True))

    @property
    def peak_by_category(self) -> dict[str, int]:
        """The peak of each category by itself; they may be at different times."""
        return {
            category: max((sizes[k] for _, sizes in self.samples), default=0)
            for k, category in enumerate(self.categories)
        }


@dataclass(frozen=True)
class Timeline:
    """Spans of one step on some meshes.

    Attributes:
        spans: in any order.
        meshes: names, in the order to show them.
        title: of the timeline.
        memory: bytes over time, per mesh, if known.
        in_steps: whether times are multiples of the unit cost, a forward, rather than seconds.
    """

    spans: tuple[Span, ...]
    meshes: tuple[str, ...]
    title: str = ""
    memory: tuple[MemoryCurve, ...] = field(default=())
    in_steps: bool = False

    def __repr__(self) -> str:
        from mpmd.scheduling.render import (  # which imports this module
            duration,
            meaning_of,
            phase_of,
            phases_of,
        )

        phases = collections.Counter(phase_of(s) for s in self.spans if s.kind == COMPUTE)
        most = max(self.memory, key=lambda curve: curve.peak_bytes, default=None)
        sent = sum(span.nbytes for span in self.transfers)
        took = f"{duration(self, self.makespan_s)}, bubble {self.bubble_fraction():.1%}"
        rows = [
            ("idle", few(f"{mesh} {self.bubble_fraction(mesh):.1%}" for mesh in self.meshes)),
            ("computations", ", ".join(f"{phases[p]:,} {meaning_of(p)}" for p in phases_of(self))),
            ("transfers", f"{len(self.transfers):,}, {bytes_text(sent)}" if self.transfers else ""),
            (
                "memory",
                f"at most {bytes_text(most.peak_bytes)} on {most.mesh}" if most and most.peak_bytes else "",
            ),
        ]
        return card(f"Timeline {self.title!r}: {took}" if self.title else f"Timeline: {took}", rows)

    def _repr_svg_(self) -> str:
        """The timeline as a picture, for notebooks."""
        from mpmd.scheduling.render_svg import render_svg  # which imports this module

        return render_svg(self)

    @functools.cached_property
    def makespan_s(self) -> float:
        """Seconds from the first begin to the last end."""
        return max((span.end_s for span in self.spans), default=self.begin_s) - self.begin_s

    @functools.cached_property
    def begin_s(self) -> float:
        """When the first span begins: zero, where the timeline counts from the begin of the step."""
        return min((span.start_s for span in self.spans), default=0.0)

    @functools.cached_property
    def _by_mesh(self) -> Mapping[str, tuple[Span, ...]]:
        lanes: dict[str, list[Span]] = {mesh: [] for mesh in self.meshes}
        for span in self.spans:
            if span.kind != TRANSFER:
                lanes[span.mesh].append(span)
        return {mesh: tuple(sorted(lane, key=lambda s: (s.start_s, s.end_s))) for mesh, lane in lanes.items()}

    def compute(self, mesh: str) -> tuple[Span, ...]:
        """The computations of a mesh, in order."""
        return tuple(span for span in self._by_mesh[mesh] if span.kind == COMPUTE)

    def idle(self, mesh: str) -> tuple[Span, ...]:
        """When and why a mesh was idle, in order, as far as the timeline says."""
        return tuple(span for span in self._by_mesh[mesh] if span.kind == IDLE)

    @functools.cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The computations and transfers that make the step as long as it is, in order; see `critical_path`.

        Empty if the timeline does not say what reads what.
        """
        return critical_path(self.spans)

    @functools.cached_property
    def transfers(self) -> tuple[Span, ...]:
        transfers = (span for span in self.spans if span.kind == TRANSFER)
        return tuple(sorted(transfers, key=lambda s: (s.start_s, s.mesh, s.peer)))

    def busy_s(self, mesh: str) -> float:
        """Seconds a mesh computed."""
        return sum(span.seconds for span in self.compute(mesh))

    def idle_s(self, mesh: str) -> float:
        """Seconds of the step in which a mesh did not compute."""
        return self.makespan_s - self.busy_s(mesh)

    def waiting_s(self, mesh: str) -> float:
        """Seconds of the step in which a mesh did not compute and a message that it needed was under way."""
        return sum(span.seconds for span in self.idle(mesh) if span.peer)

    def breakdown(self, mesh: str) -> dict[str, float]:
        """Seconds of the step by state of a mesh: `busy`, `transfer` and `idle`, which add up to the step.

        `transfer` is the time in which it had nothing to compute and waited for a message under way.
        """
        busy, waiting = self.busy_s(mesh), self.waiting_s(mesh)
        return {"busy": busy, "transfer": waiting, "idle": self.makespan_s - busy - waiting}

    def bubble_fraction(self, mesh: str | None = None) -> float:
        """The part of the step in which a mesh did not compute; without a mesh, over all meshes."""
        if self.makespan_s == 0.0 or not self.meshes:
            return 0.0
        meshes = self.meshes if mesh is None else (mesh,)
        return sum(self.idle_s(m) for m in meshes) / (self.makespan_s * len(meshes))

    def span_idle_s(self, mesh: str) -> float:
        """Seconds a mesh did not compute between its own first begin and last end.

        The measure where steps follow each other without a barrier: one mesh's late begin then overlaps with
        the previous step.
        """
        lane = self.compute(mesh)
        return lane[-1].end_s - lane[0].start_s - self.busy_s(mesh) if lane else 0.0

    @functools.cached_property
    def link_occupancy(self) -> dict[tuple[str, str], float]:
        """Per (sending mesh, receiving mesh) the part of the step in which a message was on its way."""
        ends: dict[tuple[str, str], float] = {}
        busy: dict[tuple[str, str], float] = {}
        for span in self.transfers:
            link = (span.mesh, span.peer)
            begin = max(span.start_s, ends.get(link, span.start_s))
            busy[link] = busy.get(link, 0.0) + max(0.0, span.end_s - begin)
            ends[link] = max(span.end_s, ends.get(link, span.end_s))
        return {
            link: seconds / self.makespan_s if self.makespan_s else 0.0
            for link, seconds in sorted(busy.items())
        }

    @functools.cached_property
    def peak_bytes(self) -> int:
        """The maximum of bytes that all meshes together hold at once, as far as they are known."""
        held, peak = dict.fromkeys(range(len(self.memory)), 0), 0
        changes = sorted(
            (seconds, order, k, sum(sizes))
            for k, memory in enumerate(self.memory)
            for order, (seconds, sizes) in enumerate(memory.samples)
        )
        for _, _, k, size in changes:
            held[k] = size
            peak = max(peak, sum(held.values()))
        return peak

    def memory_of(self, mesh: str) -> MemoryCurve:
        """Bytes of a mesh over time.

        Raises:
            KeyError: not known for this mesh.
        """
        return {memory.mesh: memory for memory in self.memory}[mesh]
