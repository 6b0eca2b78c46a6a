"""The built-in pipeline schedules of the dialect, as relations between the scheduling units of one mesh.

`F(i)` and `B(i)` are the forward and the backward unit of microbatch i.  A split backward is `A(i)`, for
which other meshes wait, and `W(i)`, the rest; an unsplit one counts as `A(i)`.  M is the number of meshes and
m the position of this one.

A program may contradict a schedule in part.  Then as many of its pairs hold as can, so that the pairs it is
made of decide the order: they are the dialect's, fewer than the orders in `mpmd.scheduling` imply.  Where
nothing contradicts them, the orders of GPipe, 1F1B and the circular schedules are the same; zero bubble
schedules place `W` elsewhere.

mpmd-pipeline-scheduler.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from mpmd import ir
from mpmd.errors import ConfigError
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.passes.schedule.reorder import Edges, Precedence, apply_edges, describe, way
from mpmd.support import diagnostics


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
    number = re.search(r"\d+", mesh.name)
    if number is None:
        raise ConfigError(
            f'ParallelPipelinesWithWrapAround needs a number in the name of each mesh; "{mesh.name}" has none'
        )
    own = int(number[0])

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


class PipelineScheduler(FunctionPass):
    """Orders the microbatches on every mesh by a built-in pipeline schedule.

    With `must-happen-before=1F1B` and one mesh:

        f = m1["f"] cc=0 (a) {...}                    f = m1["f"] cc=0 (a) {...}
        g = m1["f"] cc=1 (b) {...}                    h = m1["f"(1)] cc=0 (a) {...}
        h = m1["f"(1)] cc=0 (a) {...}        ->       g = m1["f"] cc=1 (b) {...}
        k = m1["f"(1)] cc=1 (b) {...}                 k = m1["f"(1)] cc=1 (b) {...}

    Only scheduling units of one mesh are ordered, and only where data flow does not order them; all other
    ops follow, and keep their order where nothing forbids it.  Each schedulable mesh is taken for one
    stage, in the order of the topology; only the circular schedules know several stages per mesh.

    Requires: one forward and one backward unit per mesh, microbatch and stage.
    Ensures: the order of the schedule.  Where it contradicts data flow, data flow wins; where it
        contradicts itself, the op that is first in the program wins; a remark shows the first such case.
    Cost: linear, as a schedule is given by neighbours only; all pairs where it contradicts data flow, or
        where its edges stay.
    Source: openxla/shardy MPMD, `pipeline_schedule`; the schedules name theirs.

    Attributes:
        must_happen_before: name of the schedule.
        remove_control_dependencies: drop the order once it is applied; merge rules need it as edges.
    """

    runs_on = "mpmd"
    must_happen_before: str = "1F1B"
    remove_control_dependencies: bool = True

    def rewrite_function(self, f: ir.Func) -> None:
        """Collects the units of each mesh, relates them, and sorts."""
        schedule = find_schedule(self.must_happen_before)
        names = f.topology.schedulable
        units: dict[str, list[SchedulingUnit]] = {name: [] for name in names}
        for fragment in ir.fragments(f):
            if fragment.is_scheduling_unit and fragment.mesh in units:
                units[fragment.mesh].append(SchedulingUnit.of(fragment))
        if not self._is_possible(schedule, units):
            return
        _notice_mesh_order(f, names)
        related = [
            (units[name], schedule(Mesh(name, len(names), position))) for position, name in enumerate(names)
        ]
        edges = _edges(f, related, all_pairs=not self.remove_control_dependencies)
        apply_edges(f, edges, self.remove_control_dependencies)

    def _is_possible(self, schedule: Schedule, units: dict[str, list[SchedulingUnit]]) -> bool:
        """Whether the schedule supports these units; reports those that it does not."""
        every = [unit for of_mesh in units.values() for unit in of_mesh]
        if schedule in STAGED and any(unit.stage is None for unit in every):
            diagnostics.notice(
                f"{self.must_happen_before} orders nothing that has no stage; assign stages to get an order"
            )
        problems = list(_forward_only_problems(units)) if schedule in FORWARD_ONLY else []
        for problem, unit in problems:
            diagnostics.error(f"{self.must_happen_before} {problem}", unit.fragment.location)
        return not problems


def _forward_only_problems(units: dict[str, list[SchedulingUnit]]) -> list[tuple[str, SchedulingUnit]]:
    problems = []
    for of_mesh in units.values():
        seen: dict[int, SchedulingUnit] = {}
        for unit in of_mesh:
            if unit.is_backward:
                problems.append((f"is for forward passes only; found {describe(unit.fragment)}", unit))
            elif unit.counter in seen:
                first = describe(seen[unit.counter].fragment)
                problems.append(
                    (f"needs one unit per mesh and microbatch: {first}; {describe(unit.fragment)}", unit)
                )
            seen.setdefault(unit.counter, unit)
    return problems


def _edges(
    f: ir.Func, related: Sequence[tuple[Sequence[SchedulingUnit], Sequence[Relation]]], all_pairs: bool
) -> Edges:
    """The edges that a schedule adds to data flow; `all_pairs` as the dialect does, which shows if they stay.

    If neighbours in the schedule, together with data flow, have no cycle, then there is no contradiction, and
    the resulting order is that of all pairs.  Else all pairs are visited in program order, and those that
    contradict earlier ones are left out.
    """
    enough = [
        (a.fragment, b.fragment)
        for units, relations in related
        for relation in relations
        for a, b in relation.enough(units)
    ]
    if not all_pairs and not Dependencies(f, enough).stable_order()[1]:
        return enough
    wanted: dict[ir.Fragment, dict[ir.Fragment, None]] = {}
    for units, relations in related:
        for relation in relations:
            for a, b in relation.every(units):
                wanted.setdefault(a.fragment, {})[b.fragment] = None
    precedence, noticed = Precedence(f), False
    program = ir.fragments(f)
    for before in program:
        afters = wanted.get(before, {})
        for after in program if afters else []:
            opposite = precedence.add(before, after) if after in afters else []
            if opposite and not noticed:
                noticed = True
                diagnostics.notice(
                    f"the schedule orders {describe(before)} before {describe(after)}, among others, but "
                    f"data flow and the rest of the schedule require the opposite: {way(opposite)}",
                    before.location,
                )
    return precedence.edges


def _notice_mesh_order(f: ir.Func, names: Sequence[str]) -> None:
    if list(names) != sorted(names):
        diagnostics.notice(
            f"the topology has its meshes in the order {', '.join(names)}, which is the order of pipeline "
            f"stages; where a mesh had to be chosen, the order was {', '.join(sorted(names))}",
            f.location,
        )
