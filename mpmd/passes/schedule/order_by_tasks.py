"""mpmd-order-by-tasks."""

from __future__ import annotations

import dataclasses
import itertools

from mpmd import ir
from mpmd.errors import ConfigError
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.passes.schedule.reordering import Edges, Precedence, apply_edges, describe
from mpmd.passes.schedule.task_orders import TableTask, TaskOrders
from mpmd.support import diagnostics

# The task of a fragment if the table has none for its own phase: a stage whose backward could not be split is
# due at its first half, and a half at its whole.
_ELSE = {"F": "", "B": "IW", "I": "B", "W": "B"}


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
Rows = dict[str, dict[TableTask, list[ir.Fragment]]]


def _fragments_by_task(f: ir.Func, orders: TaskOrders) -> Rows:
    """The fragments of each task of the table."""
    stage_of = {mesh: i for i, mesh in enumerate(f.topology.schedulable)}
    rows: Rows = {mesh: {task: [] for task in tasks} for mesh, tasks in orders.of_mesh}
    strangers = []
    for fragment in ir.fragments(f):
        task = _task_of(fragment, stage_of)
        if task is None or fragment.mesh not in rows:
            continue
        row = rows[fragment.mesh]
        candidates = [dataclasses.replace(task, phase=p) for p in task.phase + _ELSE[task.phase]]
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


def _task_of(fragment: ir.Fragment, stage_of: dict[str, int]) -> TableTask | None:
    """The task of a fragment; None if it is not a microbatch's forward or backward work."""
    stage = stage_of.get(fragment.mesh) if fragment.stage is None else fragment.stage
    if not fragment.is_scheduling_unit or fragment.is_remat or stage is None:
        return None
    phase = "F"
    if fragment.is_backward:
        phase = "I" if fragment.split_keep_transferred else "W" if fragment.split_drop_transferred else "B"
    counter = fragment.call_counter
    return None if counter is None else TableTask(stage, counter, phase)


def _called(op: ir.Op, task_of: dict[ir.Fragment, tuple[str, TableTask]]) -> str:
    return f"{task_of[op][1]} {describe(op)}" if op in task_of else describe(op)


def _reason(op: ir.Op, needed: ir.Op) -> str:
    reads = any(ir.producer(v) == needed for v in ir.read_by(op))
    return "reads a result of" if reads else "comes in the order after"
