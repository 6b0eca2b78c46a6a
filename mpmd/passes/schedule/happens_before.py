"""The built-in pipeline schedules of the dialect, as relations between the scheduling units of one mesh.

`F(i)` and `B(i)` are the forward and the backward unit of microbatch i.  A split backward is `A(i)`, for
which other meshes wait, and `W(i)`, the rest; an unsplit one counts as `A(i)`.  M is the number of meshes and
m the position of this one.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from mpmd import ir
from mpmd.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SchedulingUnit:
    """One microbatch's forward or backward work on one mesh.

    Attributes:
        fragment: the work.
        phase: `"F"` forward; `"W"` the half of a backward for which no mesh waits; `"A"` every other
            backward.
        counter: its microbatch.
        stage: its pipeline stage, if it has one.
    """

    fragment: ir.Fragment
    phase: str
    counter: int
    stage: int | None

    @staticmethod
    def of(fragment: ir.Fragment) -> SchedulingUnit:
        """The unit of a fragment, which must be a scheduling unit.

        Raises:
            ValueError: it has no call counter.
        """
        if fragment.call_counter is None:
            raise ValueError(f"not a scheduling unit: {fragment}")
        phase = "F" if fragment.is_forward else "W" if fragment.split_drop_transferred else "A"
        return SchedulingUnit(fragment, phase, fragment.call_counter, fragment.stage)

    @property
    def is_backward(self) -> bool:
        """Whether it is `A` or `W`."""
        return self.phase != "F"


Pairs = Iterator[tuple[SchedulingUnit, SchedulingUnit]]


class Relation(Protocol):
    """The relation between units."""

    def every(self, units: Sequence[SchedulingUnit]) -> Pairs:
        """All pairs (before, after)."""

    def enough(self, units: Sequence[SchedulingUnit]) -> Pairs:
        """Some of all pairs, whose transitive closure is all pairs."""


@dataclasses.dataclass(frozen=True)
class ByKey:
    """By a key; units of equal keys are not ordered, those without key (None) not at all."""

    key: Callable[[SchedulingUnit], Any]

    def every(self, units: Sequence[SchedulingUnit]) -> Pairs:
        """Each unit before all with a greater key."""
        groups = self._groups(units)
        for i, group in enumerate(groups):
            for later in groups[i + 1 :]:
                yield from itertools.product(group, later)

    def enough(self, units: Sequence[SchedulingUnit]) -> Pairs:
        """Each unit before those with the next greater key."""
        for group, following in itertools.pairwise(self._groups(units)):
            yield from itertools.product(group, following)

    def _groups(self, units: Sequence[SchedulingUnit]) -> list[list[SchedulingUnit]]:
        keyed = [(self.key(unit), unit) for unit in units]
        ordered = sorted((k for k in keyed if k[0] is not None), key=lambda k: k[0])
        return [[u for _, u in group] for _, group in itertools.groupby(ordered, key=lambda k: k[0])]


@dataclasses.dataclass(frozen=True)
class ByOffset:
    """`x(i) < y(i + offset)`, for x in `before`, y in `after`, and i of at least `start`."""

    before: str
    after: str
    offset: int
    start: int = 0

    def every(self, units: Sequence[SchedulingUnit]) -> Pairs:
        """One partner per unit and phase."""
        index: dict[int, list[SchedulingUnit]] = {}
        for unit in units:
            if unit.phase in self.after:
                index.setdefault(unit.counter, []).append(unit)
        for unit in units:
            if unit.phase in self.before and unit.counter >= self.start:
                for partner in index.get(unit.counter + self.offset, []):
                    yield unit, partner

    enough = every


@dataclasses.dataclass(frozen=True)
class FirstForwards:
    """`F(i)` before every backward unit, for i less than `count`."""

    count: int

    def every(self, units: Sequence[SchedulingUnit]) -> Pairs:
        """`count` times the number of backward units."""
        first = [unit for unit in units if unit.phase == "F" and unit.counter < self.count]
        yield from itertools.product(first, [unit for unit in units if unit.is_backward])

    enough = every


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The position of a mesh: M and m, and its name."""

    name: str
    count: int
    position: int


Schedule = Callable[[Mesh], Sequence[Relation]]


def none(mesh: Mesh) -> Sequence[Relation]:
    """No order beyond data flow."""
    del mesh
    return []


def gpipe(mesh: Mesh) -> Sequence[Relation]:
    del mesh
    return [ByKey(lambda u: (u.is_backward, u.counter))]


def one_f_one_b(mesh: Mesh) -> Sequence[Relation]:
    """Forwards to fill the pipeline, then one backward and one forward in turn."""
    ahead = mesh.count - mesh.position
    return [
        ByKey(lambda u: None if u.is_backward else u.counter),
        ByKey(lambda u: u.counter if u.is_backward else None),
        ByOffset("AW", "F", ahead),
        ByOffset("F", "AW", 1 - ahead),
    ]


def gpipe_but_1f1b_for_last_mesh(mesh: Mesh) -> Sequence[Relation]:
    """GPipe, but one backward and one forward in turn where backwards begin."""
    return one_f_one_b(mesh) if mesh.position == mesh.count - 1 else gpipe(mesh)


def zero_bubble_h1(mesh: Mesh) -> Sequence[Relation]:
    """1F1B whose weight gradients fill the bubbles, in the memory of 1F1B.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
    """
    ahead, m = mesh.count - mesh.position, mesh.position
    return [
        ByOffset("A", "F", ahead),
        ByOffset("F", "A", 1 - ahead),
        ByOffset("W", "F", mesh.count),
        ByOffset("A", "W", -m),
        ByOffset("W", "A", m + 1),
    ]


def zero_bubble_h2(latency: float) -> Schedule:
    """Enough forwards in flight that no bubble is left, for transfers of `latency` tasks.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
    """

    def entries(mesh: Mesh, position: int) -> int:
        left = mesh.count - position
        return int(2 * left - 1 + 2 * (left - 1) * latency)

    def schedule(mesh: Mesh) -> Sequence[Relation]:
        e = entries(mesh, mesh.position)
        c = entries(mesh, mesh.count - mesh.position - 1)
        return [
            FirstForwards(e),
            ByOffset("A", "F", e),
            ByOffset("F", "A", 1 - e, start=e),
            ByOffset("A", "W", 1 - c),
            ByOffset("W", "A", c),
        ]

    return schedule


def parallel_pipelines_with_wrap_around(mesh: Mesh) -> Sequence[Relation]:
    """Forward only; each mesh begins with the microbatch of its own number.

    Then those below it, descending, then those above it, descending.

    Raises:
        ConfigError: the mesh's name has no number.
    """
    found = re.search(r"\d+", mesh.name)
    if found is None:
        raise ConfigError(
            f'ParallelPipelinesWithWrapAround needs a number in the name of each mesh; "{mesh.name}" has none'
        )
    own = int(found[0])

    def key(unit: SchedulingUnit) -> tuple[bool, bool, int]:
        return (unit.counter != own, unit.counter > own, -unit.counter)

    return [ByKey(key)]


def circular(mesh: Mesh) -> Sequence[Relation]:
    """Several stages per mesh: M microbatches through a stage, then the same ones through the next."""
    return [ByKey(lambda u: _circular_key(u, mesh.count, reversed_backward=False))]


def circular_with_reversed_backward(mesh: Mesh) -> Sequence[Relation]:
    """Circular, whose backwards go through everything in the opposite order."""
    return [ByKey(lambda u: _circular_key(u, mesh.count, reversed_backward=True))]


def _circular_key(
    unit: SchedulingUnit, meshes: int, reversed_backward: bool
) -> tuple[bool, int, int, int] | None:
    if unit.stage is None:
        return None
    wave = unit.counter // meshes
    if not unit.is_backward:
        return (False, wave, unit.stage, unit.counter)
    sign = -1 if reversed_backward else 1
    return (True, sign * wave, -unit.stage, sign * unit.counter)


SCHEDULES: dict[str, Schedule] = {
    "none": none,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "GPipeBut1F1BForLastMesh": gpipe_but_1f1b_for_last_mesh,
    "ZeroBubbleH1": zero_bubble_h1,
    "ZeroBubbleH2ZeroTxLatency": zero_bubble_h2(0.0),
    "ZeroBubbleH2HalfTxLatency": zero_bubble_h2(0.5),
    "ZeroBubbleH2FullTxLatency": zero_bubble_h2(1.0),
    "ParallelPipelinesWithWrapAround": parallel_pipelines_with_wrap_around,
    "Circular": circular,
    "CircularWithReversedBackward": circular_with_reversed_backward,
}
STAGED = (circular, circular_with_reversed_backward)
FORWARD_ONLY = (parallel_pipelines_with_wrap_around,)


def find_schedule(name: str) -> Schedule:
    """A schedule by its name, in upper or lower case.

    Raises:
        ConfigError: there is none of that name.
    """
    for known, schedule in SCHEDULES.items():
        if known.lower() == name.lower():
            return schedule
    raise ConfigError(f"unknown pipeline schedule {name!r}\n  there are: {', '.join(SCHEDULES)}")
