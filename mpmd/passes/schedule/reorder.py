"""Passes that reorder fragments, by a table of tasks or by rules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from mpmd import ir
from mpmd.errors import ConfigError
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies, put_control_edges
from mpmd.passes.fragments.fragment_info import FragmentInfo, FragmentScheduleRule
from mpmd.scheduling.table import Phase, Task, TaskOrders
from mpmd.support import diagnostics

# The task of a fragment if the table has none for its own phase: a stage whose backward could not be split is
# due at its first half, and a half at its whole.
_ELSE = {Phase.F: (), Phase.B: (Phase.I, Phase.W), Phase.I: (Phase.B,), Phase.W: (Phase.B,)}

_NO_ORDERS = TaskOrders()


class OrderByTasks(FunctionPass):
    """Orders the fragments of every mesh by a table of tasks.

    With `orders=m1:0F0,0B0,0F1,0B1`:

        f = m1["f"] cc=0 (a) {...}                    f = m1["f"] cc=0 (a) {...}
        g = m1["f"] cc=1 (b) {...}                    h = m1["f"(1)] cc=0 (a) {...}
        h = m1["f"(1)] cc=0 (a) {...}        ->       g = m1["f"] cc=1 (b) {...}
        k = m1["f"(1)] cc=1 (b) {...}                 k = m1["f"(1)] cc=1 (b) {...}

    The task of a user fragment is its stage (else the position of its mesh among those that count as
    stages), its call counter, and its phase: forward, backward, or half of a split backward.  Other
    fragments, and all other ops, follow by data flow and keep their order where nothing forbids it.

    Requires: at most one task per mesh position; microbatches count from 0 as in the table.
    Ensures: the order of the table on every mesh.  Error: the table contradicts data flow; names the first
        task that can never run, and why; unless `fail_on_impossible_order` a warning, and the tasks are in
            the order of the table as far as the data flow allows.  Remark: tasks without a fragment, and the
            reverse.
    Cost: linear; if the order is impossible, quadratic in fragments.
    Source: ours.

    Attributes:
        orders: for each mesh its tasks in order, `"m1:0F0,0F1,0B0;m2:1F0,1B0"`.
        remove_control_dependencies: drop the order once it is applied; merge rules need it as edges.
        fail_on_impossible_order: a table that contradicts data flow is an error, not a warning.
    """

    runs_on = "entry"
    orders: TaskOrders = _NO_ORDERS
    remove_control_dependencies: bool = True
    fail_on_impossible_order: bool = True

    def rewrite_function(self, f: ir.Func) -> None:
        """Puts an edge between neighbours of the table, and sorts.

        Raises:
            ConfigError: the orders name a mesh that is not in the topology.
        """
        topology = f.topology
        for mesh, _ in self.orders.of_mesh:
            if mesh not in topology:
                raise ConfigError(f"the order is for mesh {mesh!r}; the topology has {', '.join(topology)}")
        rows = _fragments_by_task(f, self.orders)
        edges = _edges(rows)
        cycle = Dependencies(f, edges).stable_order()[1]
        if cycle:
            self._report(cycle, rows)
            if self.fail_on_impossible_order:
                return
            edges = _possible(f, edges)
        apply_edges(f, edges, self.remove_control_dependencies)

    def _report(self, cycle: list[ir.Op], rows: Rows) -> None:
        """Names the first task that can never run: the first of the table that is on the cycle."""
        tasks = ((mesh, task, group) for mesh, row in rows.items() for task, group in row.items())
        task_of = {fragment: (mesh, task) for mesh, task, group in tasks for fragment in group}
        on_cycle = [op for op in cycle if op in task_of]
        position = {g: i for i, g in enumerate(task_of)}
        first = min(on_cycle, key=lambda g: position[g])
        start = cycle.index(first)
        turned = [*cycle[start:], *cycle[:start], first]
        mesh, task = task_of[first]
        lines = [
            f"  {_called(op, task_of)}\n    {_reason(op, needed)} {_called(needed, task_of)}"
            for op, needed in itertools.pairwise(turned)
        ]
        text = (
            f'the order is impossible: task {task} of mesh "{mesh}" can never run, as it waits for itself:\n'
            + "\n".join(lines)
        )
        if self.fail_on_impossible_order:
            diagnostics.error(f"{text}\nMove one of these tasks in the order.", first.location)
        else:
            diagnostics.warning(
                f"{text}\nAll tasks run in that order as far as the data flow allows.", first.location
            )


def _edges(rows: Rows) -> Edges:
    """An edge between neighbours of each row, those at the beginning of the rows first."""
    pairs = (itertools.pairwise(row.values()) for row in rows.values())
    columns = itertools.zip_longest(*pairs, fillvalue=((), ()))
    return [edge for column in columns for pair in column for edge in itertools.product(*pair)]


def _possible(f: ir.Func, edges: Edges) -> Edges:
    """The edges that contradict neither the data flow nor the edges before them."""
    precedence = Precedence(f)
    for before, after in edges:
        precedence.add(before, after)
    return precedence.edges


# Mesh -> task -> its fragments, in the order of the table.
Rows = dict[str, dict[Task, list[ir.Fragment]]]


def _fragments_by_task(f: ir.Func, orders: TaskOrders) -> Rows:
    stage_of = {mesh: i for i, mesh in enumerate(f.topology.schedulable)}
    rows: Rows = {mesh: {task: [] for task in tasks} for mesh, tasks in orders.of_mesh}
    strangers = []
    for fragment in ir.fragments(f):
        task = _task_of(fragment, stage_of)
        if task is None or fragment.mesh not in rows:
            continue
        row = rows[fragment.mesh]
        candidates = [dataclasses.replace(task, phase=p) for p in (task.phase, *_ELSE[task.phase])]
        known = next((t for t in candidates if t in row), None)
        if known is None:
            strangers.append(f"{task} {describe(fragment)}")
        else:
            row[known].append(fragment)
    idle = [str(task) for row in rows.values() for task, group in row.items() if not group]
    if idle:
        diagnostics.notice(f"the order has tasks without a fragment: {', '.join(idle)}", f.location)
    if strangers:
        diagnostics.notice(f"the order does not contain {'; '.join(strangers)}", f.location)
    return {mesh: {task: group for task, group in row.items() if group} for mesh, row in rows.items()}


def tasks_of(f: ir.Func) -> dict[Task, list[ir.Fragment]]:
    """The fragments of each task."""
    stage_of = {mesh: i for i, mesh in enumerate(f.topology.schedulable)}
    found: dict[Task, list[ir.Fragment]] = {}
    for fragment in ir.fragments(f):
        task = _task_of(fragment, stage_of)
        if task is not None:
            found.setdefault(task, []).append(fragment)
    return found


def _task_of(fragment: ir.Fragment, stage_of: dict[str, int]) -> Task | None:
    """The task of a fragment; None if it is not a microbatch's forward or backward work."""
    stage = stage_of.get(fragment.mesh) if fragment.stage is None else fragment.stage
    if not fragment.is_scheduling_unit or fragment.is_remat or stage is None:
        return None
    phase = Phase.F
    if fragment.is_backward:
        keeps, drops = fragment.split_keep_transferred, fragment.split_drop_transferred
        phase = Phase.I if keeps else Phase.W if drops else Phase.B
    counter = fragment.call_counter
    return None if counter is None else Task(stage, counter, phase)


def _called(op: ir.Op, task_of: dict[ir.Fragment, tuple[str, Task]]) -> str:
    return f"{task_of[op][1]} {describe(op)}" if op in task_of else describe(op)


def _reason(op: ir.Op, needed: ir.Op) -> str:
    reads = any(ir.producer(v) == needed for v in ir.read_by(op))
    return "reads a result of" if reads else "comes in the order after"


Edges = Sequence[tuple[ir.Fragment, ir.Fragment]]


class Precedence:
    """A partial order: data flow, and edges that are added as long as they fit.

    Attributes:
        edges: the added edges, (before, after).
    """

    def __init__(self, f: ir.Func) -> None:
        self.edges: list[tuple[ir.Fragment, ir.Fragment]] = []
        self._dependencies = Dependencies(f)
        self._earlier = self._dependencies.reach()

    def add(self, before: ir.Fragment, after: ir.Fragment) -> list[ir.Op]:
        """Adds an edge, unless the order is known already.

        Returns:
            Nothing; or, if the opposite is known, the ops on a path from `after` to `before`.
        """
        place = self._dependencies.place
        i, j = place[before], place[after]
        if self._earlier[j] >> i & 1:
            return []
        if self._earlier[i] >> j & 1:
            return self._dependencies.path(after, before)
        self.edges.append((before, after))
        self._dependencies.needs[j].add(i)
        gained = self._earlier[i] | 1 << i
        for k, earlier in enumerate(self._earlier):
            if k == j or earlier >> j & 1:
                self._earlier[k] = earlier | gained
        return []


def apply_edges(f: ir.Func, edges: Edges, remove_control_dependencies: bool) -> None:
    """Sorts a function by data flow and `edges`, which it keeps as control edges by default."""
    order, _ = Dependencies(f, edges).stable_order()
    ir.reorder(f, order)
    put_control_edges(f, [] if remove_control_dependencies else edges)


def way(ops: Sequence[ir.Op]) -> str:
    return " -> ".join(map(describe, ops))


def describe(op: ir.Op) -> str:
    if isinstance(op, ir.Transfer):
        return f'transfer from mesh "{op.tensor.type.mesh}" to "{op.result.type.mesh}"'
    if not isinstance(op, ir.Fragment):
        return str(op.operation.name)
    text = f"fragment {', '.join(map(str, op.origins))}" if op.is_user else "inferred fragment"
    text += f' on mesh "{op.mesh}"'
    if op.stage is not None:
        text += f", stage {op.stage}"
    if op.call_counter is not None:
        text += f", microbatch {op.call_counter}"
    return f"({text})"


class RuleBasedSchedule(FunctionPass):
    """Orders fragments by the user's rules.

    With `rules=FragmentScheduleRule(ordered_fragments=[INFO_OF_G->INFO_OF_F])`:

        f = m1["f"] cc=0 (a) {...}         g = m1["g"] cc=0 (b) {...}
        g = m1["g"] cc=0 (b) {...}    ->   f = m1["f"] cc=0 (a) {...}

    Requires: no two user fragments of a function have the same info.  Error: two named computations share
        a name, a mesh and a microbatch.
    Ensures: the order of the rules, where data flow and earlier rules leave a choice; all other ops keep
        their order where nothing forbids it.  Remark: the parts of a rule that were left out.
    Cost: linear in the module and in the rules, but for the reachability of n ops: n*n bits.
    Source: openxla/shardy MPMD, `rule_based_schedule`.

    Attributes:
        rules: fragments in the order in which they are to run.
        remove_control_dependencies: drop the order once it is applied; merge rules need it as edges.
    """

    runs_on = "mpmd"
    rules: tuple[FragmentScheduleRule, ...] = ()
    remove_control_dependencies: bool = True

    def rewrite_function(self, f: ir.Func) -> None:
        """Adds an edge per pair of neighbours of each rule, then sorts."""
        known = _fragments_by_info(f)
        if known is None:
            return
        precedence = Precedence(f)
        for rule in self.rules:
            if len(rule.ordered_fragments) < 2:
                diagnostics.notice(f"a rule that orders less than two fragments: {rule}", f.location)
            _follow(rule, known, precedence, f)
        apply_edges(f, precedence.edges, self.remove_control_dependencies)


def _fragments_by_info(f: ir.Func) -> dict[FragmentInfo, ir.Fragment] | None:
    """The user fragments by the attributes that rules use; None if these are ambiguous."""
    known: dict[FragmentInfo, ir.Fragment] = {}
    unique = True
    for fragment in ir.fragments(f):
        if not fragment.is_user:
            continue
        info = FragmentInfo.of(fragment)
        if info in known:
            unique = False
            diagnostics.error(
                f"Fragment info {info} already exists for another fragment: rules cannot distinguish them. "
                "Two named computations share a name; give each a name of its own.\n"
                f"  one is at {known[info].location}, the other at {fragment.location}",
                f.location,
            )
        known.setdefault(info, fragment)
    return known if unique else None


def _follow(
    rule: FragmentScheduleRule,
    known: dict[FragmentInfo, ir.Fragment],
    precedence: Precedence,
    f: ir.Func,
) -> None:
    before = rule.ordered_fragments[0] if rule.ordered_fragments else None
    for after in rule.ordered_fragments[1:]:
        if before not in known:
            diagnostics.notice(f"a schedule rule names {before}, which is not a fragment", f.location)
            before = after
            continue
        if after not in known:
            diagnostics.notice(f"a schedule rule names {after}, which is not a fragment", f.location)
            continue
        first, second = known[before], known[after]
        if first.mesh != second.mesh:
            diagnostics.notice(
                f"a schedule rule orders fragments of two meshes: {before}, {after}", f.location
            )
        else:
            opposite = precedence.add(first, second)
            if opposite:
                diagnostics.notice(
                    f"a schedule rule orders {before} before {after}, but the opposite is known: "
                    f"{way(opposite)}",
                    first.location,
                )
        before = after
