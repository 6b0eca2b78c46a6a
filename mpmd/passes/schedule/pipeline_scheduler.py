"""mpmd-pipeline-scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.passes.schedule.happens_before import (
    FORWARD_ONLY,
    STAGED,
    Mesh,
    Relation,
    Schedule,
    SchedulingUnit,
    find_schedule,
)
from mpmd.passes.schedule.order import Edges, Precedence, apply_edges, describe, way
from mpmd.support import diagnostics


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
