"""mpmd-infer-mesh-populate-use-set."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.import_.infer_mesh import flow
from mpmd.passes.import_.infer_mesh.sets import USE_SET, Key, MeshSet, Table

_MAX_ROUNDS = 10


@dataclasses.dataclass(frozen=True)
class InferMeshPopulateUseSet(ModulePass):
    """Notes for every value on which meshes it is needed, and who needs it there.

        s = mul a b; p = assign s to m1 by f
        -->  s = mul a b {use_set=m1["f"]}; p = assign s to m1 by f {use_set=m1["f"]}

    Backward from the assigns.  A call counts as what it calls; a callee is gone through again when a call
    adds a mesh to one of its results. Requires: names are mapped.  Ensures: `mpmd.use_set` on ops,
    arguments, results of callees and arguments of loops that are needed anywhere.  Cost: linear, times the
    number of rounds until callees are stable. Source: openxla/shardy MPMD, `infer_mesh_assignment`.
    """

    name: ClassVar[str] = "mpmd-infer-mesh-populate-use-set"

    def rewrite(self, module: ir.Module) -> None:
        """Goes backward over the entry functions."""
        analysis = _UseSets(ir.symbol_table(module))
        for f in flow.mpmd_functions(module):
            if f.is_public:
                analysis.visit(f)
        analysis.table.write()


@dataclasses.dataclass(frozen=True)
class _Step:
    """One op of a function, last first: what it adds to which set.

    `gives` has the key of a set and those that are united into it.
    """

    gives: list[tuple[Key, list[Key]]]
    own: MeshSet | None = None
    call: ir.Call | None = None


def _has_use_set(op: ir.Op) -> bool:
    return isinstance(op, ir.Unassign) or flow.is_barrier(op) or flow.is_meshless(op)


class _UseSets:
    def __init__(self, symbols: dict[str, ir.Func]) -> None:
        self.table = Table(USE_SET)
        self._symbols = symbols
        self._steps: dict[str, list[_Step]] = {}
        self._in_chain: dict[ir.Call, bool] = {}

    def visit(self, f: ir.Func) -> None:
        """Goes backward over a function, then notes the sets of its arguments."""
        if f.symbol not in self._steps:
            args = [((f, "arg", i), flow.use_keys(arg, self._symbols)) for i, arg in enumerate(f.args)]
            self._steps[f.symbol] = [*self._steps_of(f), _Step(args)]
        for step in self._steps[f.symbol]:
            if step.own is not None:
                self.table.put(step.gives[0][0], step.own)
            elif step.call is not None:
                self._visit_call(step)
            for key, sources in step.gives:
                self._unite(key, sources)

    def _unite(self, key: Key, sources: list[Key]) -> MeshSet:
        found = self.table.uses(key)
        for source in sources:
            found |= self.table.uses(source)
        if found:
            self.table.put(key, found)
        return found

    def _steps_of(self, body: ir.Func | ir.For) -> list[_Step]:
        steps = []
        for op in reversed(ir.ops(body)):
            if isinstance(op, ir.Assign):
                own = MeshSet.of(op.result.type.mesh, *([op.reason] if op.reason else []))
                steps.append(_Step([(op, [])], own))
            elif isinstance(op, ir.Call):
                steps.append(_Step(self._call_gives(op), call=op))
            elif isinstance(op, ir.For):
                steps += self._loop_steps(op)
            elif _has_use_set(op):
                keys = [key for r in op.results for key in flow.use_keys(r, self._symbols)]
                steps.append(_Step([(op, keys)]))
        return steps

    def _loop_steps(self, op: ir.For) -> list[_Step]:
        """What a loop's results are needed for is needed of what its body returns."""
        gives = []
        for result, value in zip(op.results, op.returned):
            source = ir.producer(value)
            if isinstance(source, ir.Call):
                key: Key = (self._symbols[source.callee_name], "result", ir.result_index(value))
            elif source is not None and _has_use_set(source):
                key = source
            else:
                continue
            gives.append((key, flow.use_keys(result, self._symbols)))
        args = [((op, "arg", i), flow.use_keys(arg, self._symbols)) for i, arg in enumerate(op.args)]
        return [_Step(gives), *self._steps_of(op), _Step(args)]

    def _call_gives(self, op: ir.Call) -> list[tuple[Key, list[Key]]]:
        callee = self._symbols[op.callee_name]
        return [((callee, "result", i), flow.use_keys(r, self._symbols)) for i, r in enumerate(op.results)]

    def _visit_call(self, step: _Step) -> None:
        """Goes through the callee if this call changes it, again and again if calls of it are chained."""
        call = step.call
        assert call is not None
        changed = self._visit_callee(step)
        rounds = _MAX_ROUNDS if self._is_in_chain(call) else 0
        while changed and rounds:
            changed = self._visit_callee(step)
            rounds -= 1

    def _visit_callee(self, step: _Step) -> bool:
        assert step.call is not None
        callee = self._symbols[step.call.callee_name]
        changed = False
        for key, sources in step.gives:
            before = len(self.table.uses(key).meshes)
            changed |= len(self._unite(key, sources).meshes) != before
        known = any(self.table.get((callee, "arg", i)) is not None for i in range(len(callee.args)))
        if changed or not known:
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
