"""mpmd-infer-mesh-populate-use-set."""

from __future__ import annotations

import dataclasses

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.import_.infer_mesh import flow
from mpmd.passes.import_.infer_mesh.sets import USE_SET, Cell, Key, MeshSet, Table

_MAX_ROUNDS = 10


class InferMeshPopulateUseSet(ModulePass):
    """Records for every value on which meshes it is needed, and by which uses.

        s = mul a b; p = assign s to m1 by f
        -->  s = mul a b {use_set=m1["f"]}; p = assign s to m1 by f {use_set=m1["f"]}

    Backward from the assigns.  A call counts as its callee; a callee is visited again when a call
    adds a mesh to one of its results.

    Requires: names are mapped.  Ensures: `mpmd.use_set` on ops, arguments, results of callees and arguments
    of loops that are needed anywhere.  Cost: linear, times the number of rounds until callees are stable.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Goes backward over the entry functions."""
        analysis = _UseSets(ir.symbol_table(module))
        for f in flow.mpmd_functions(module):
            if f.is_public:
                analysis.visit(f)
        analysis.table.write()


@dataclasses.dataclass(frozen=True)
class _UseStep:
    """One op of a function, last first: which sets it extends.

    `gives` has sets and those that are united into each.
    """

    gives: list[tuple[Cell, list[Cell]]]
    own: MeshSet | None = None
    call: ir.Call | None = None


def _has_use_set(op: ir.Op) -> bool:
    return isinstance(op, ir.Unassign) or flow.is_barrier(op) or flow.is_meshless(op)


class _UseSets:
    def __init__(self, symbols: dict[str, ir.Func]) -> None:
        self.table = Table(USE_SET)
        self._symbols = symbols
        self._steps: dict[str, list[_UseStep]] = {}
        self._args: dict[str, list[Cell]] = {}
        self._in_chain: dict[ir.Call, bool] = {}

    def visit(self, f: ir.Func) -> None:
        """Goes backward over a function, then records the sets of its arguments."""
        if f.symbol not in self._steps:
            self._steps[f.symbol] = [*self._steps_of(f), self._step_of_args(f)]
        for step in self._steps[f.symbol]:
            if step.own is not None:
                step.gives[0][0].put(step.own)
            elif step.call is not None:
                self._visit_call(step)
            for cell, sources in step.gives:
                _unite(cell, sources)

    def _given_by(self, value: ir.Value) -> list[Cell]:
        """The sets of the uses of a value."""
        return [self.table.cell(key) for key in flow.use_keys(value, self._symbols)]

    def _step_of_args(self, body: ir.Func | ir.For) -> _UseStep:
        return _UseStep(
            [(self.table.cell((body, "arg", i)), self._given_by(arg)) for i, arg in enumerate(body.args)]
        )

    def _steps_of(self, body: ir.Func | ir.For) -> list[_UseStep]:
        steps = []
        for op in reversed(ir.ops(body)):
            if isinstance(op, ir.Assign):
                own = MeshSet.of(op.result.type.mesh, *([op.reason] if op.reason else []))
                steps.append(_UseStep([(self.table.cell(op), [])], own))
            elif isinstance(op, ir.Call):
                steps.append(_UseStep(self._call_gives(op), call=op))
            elif isinstance(op, ir.For):
                steps += self._loop_steps(op)
            elif _has_use_set(op):
                sources = [cell for r in op.results for cell in self._given_by(r)]
                steps.append(_UseStep([(self.table.cell(op), sources)]))
        return steps

    def _loop_steps(self, op: ir.For) -> list[_UseStep]:
        """The uses of a loop's results count for the values that its body returns."""
        gives = []
        for result, value in zip(op.results, op.returned):
            source = ir.producer(value)
            if isinstance(source, ir.Call):
                key: Key = (self._symbols[source.callee_name], "result", ir.result_index(value))
            elif source is not None and _has_use_set(source):
                key = source
            else:
                continue
            gives.append((self.table.cell(key), self._given_by(result)))
        return [_UseStep(gives), *self._steps_of(op), self._step_of_args(op)]

    def _call_gives(self, op: ir.Call) -> list[tuple[Cell, list[Cell]]]:
        callee = self._symbols[op.callee_name]
        return [(self.table.cell((callee, "result", i)), self._given_by(r)) for i, r in enumerate(op.results)]

    def _visit_call(self, step: _UseStep) -> None:
        """Goes through the callee if this call changes it, again and again if calls of it are chained."""
        call = step.call
        assert call is not None
        changed = self._visit_callee(step)
        rounds = _MAX_ROUNDS if self._is_in_chain(call) else 0
        while changed and rounds:
            changed = self._visit_callee(step)
            rounds -= 1

    def _visit_callee(self, step: _UseStep) -> bool:
        assert step.call is not None
        callee = self._symbols[step.call.callee_name]
        changed = False
        for cell, sources in step.gives:
            before = len(cell.meshes.meshes)
            changed |= len(_unite(cell, sources).meshes) != before
        if callee.symbol not in self._args:
            self._args[callee.symbol] = [self.table.cell((callee, "arg", i)) for i in range(len(callee.args))]
        if changed or all(cell.found is None for cell in self._args[callee.symbol]):
            self.visit(callee)
            return True
        return False

    def _is_in_chain(self, call: ir.Call) -> bool:
        """Whether a result of the call is given to another call of the same function."""
        if call not in self._in_chain:
            users = ir.users(call)
            self._in_chain[call] = any(
                isinstance(user, ir.Call) and user.callee_name == call.callee_name for user in users
            )
        return self._in_chain[call]


def _unite(cell: Cell, sources: list[Cell]) -> MeshSet:
    """Unites sets into another, which they may leave empty; that set."""
    found = cell.meshes
    for source in sources:
        if source.found is not None:
            found |= source.found
    if found:
        cell.put(found)
    return found
