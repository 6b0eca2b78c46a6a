"""Which meshes a value can be computed on, and which need it."""

from __future__ import annotations

import dataclasses

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import mesh_sets
from mpmd.passes.import_.infer_mesh.mesh_sets import (
    REDUCE,
    SRC_SET,
    USE_SET,
    Cell,
    Key,
    MeshSet,
    Table,
    both,
)


class InferMeshPopulateSrcSet(ModulePass):
    """Records for every value on which meshes it can be without a transfer that the user did not write.

        u = unassign a@m1; s = add u b  -->  u = unassign a {src_set=m1}; s = add u b {src_set=m1}

    Forward: an op can be where all values that it reads can, in its regions too.  Arguments of the program
    can be wherever they are needed, and scalars anywhere.  An op that adds up (or otherwise reduces) values
    that can nowhere be together becomes a *cross-mesh reduction*: it is marked, and can be where any of its
    operands can.

    Requires: use sets.  Ensures: `mpmd.src_set` on values that are bound to some meshes; without it a value
        can be
        anywhere.  Cost: linear, times the number of calls that narrow the sets of their callee.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.
    """

    def rewrite(self, module: ir.Module) -> None:
        analysis = _SrcSets(ir.symbol_table(module))
        for f in mesh_sets.mpmd_functions(module):
            if f.is_public:
                analysis.enter(f)
        analysis.write()


@dataclasses.dataclass(frozen=True)
class _SourceStep:
    """One op of a function or loop, with its own set and those of its operands, which may be anywhere."""

    op: ir.Op
    own: Cell
    operands: list[Cell | None]


def _is_scalar(kind: ir.Type) -> bool:
    return assigning.is_tensor(kind) and not kind.shape


def _read(op: ir.Op) -> list[ir.Value]:
    """What decides where an op can be: its operands, and what its regions capture, if it needs a mesh."""
    captures = mesh_sets.is_meshless(op) and len(op.operation.regions)
    return assigning.read_from_above(op) if captures else list(op.operands)


class _SrcSets:
    def __init__(self, symbols: dict[str, ir.Func]) -> None:
        self._symbols = symbols
        self._sets = Table(SRC_SET)
        self._use_sets = Table(USE_SET)
        self._steps: dict[ir.Op, list[_SourceStep]] = {}
        self._reductions: dict[ir.Op, str] = {}
        self._visited: set[str] = set()

    def enter(self, f: ir.Func) -> None:
        for i in range(len(f.args)):
            needed = self._use_sets.cell((f, "arg", i)).meshes
            if needed and not _is_scalar(f.args[i].type):
                self._sets.cell((f, "arg", i)).put(_inferred(needed))
        self._visit(f, is_entry=True)

    def write(self) -> None:
        """Puts the sets, and the marks of reductions, into attributes."""
        self._sets.write()
        for op, kind in self._reductions.items():
            ir.put(op, REDUCE, ir.Attribute.parse(f"#mpmd.reduction<{kind}>"))

    def _visit(self, body: ir.Op, is_entry: bool) -> None:
        if body not in self._steps:
            self._steps[body] = [
                _SourceStep(op, self._sets.cell(op), [self._source(v) for v in _read(op)])
                for op in ir.ops(body)
                if isinstance(op, (ir.Assign, ir.Unassign, ir.Call, ir.For)) or mesh_sets.is_meshless(op)
            ]
        for step in self._steps[body]:
            op = step.op
            if isinstance(op, ir.Unassign):
                self._visit_unassign(op, step.own, is_entry)
            elif isinstance(op, ir.Call):
                self._visit_call(op, step.operands)
            elif isinstance(op, ir.For):
                for i, source in enumerate(step.operands):
                    if source is not None and source.found is not None:
                        self._sets.cell((op, "arg", i)).put(source.found)
                self._visit(op, is_entry)
            else:
                self._visit_op(step)

    def _source(self, value: ir.Value) -> Cell | None:
        """The set of a value; None if it can be anywhere."""
        key = mesh_sets.source_key(value, self._symbols)
        return None if key is None else self._sets.cell(key)

    def _visit_unassign(self, op: ir.Unassign, own: Cell, is_entry: bool) -> None:
        """Its mesh, then those that its operand is transferred to; for an argument, those that need it."""
        meshes = MeshSet.of(op.tensor.type.mesh, *([op.reason] if op.reason else []))
        for user in ir.users(op.tensor):
            if isinstance(user, ir.Transfer):
                meshes |= MeshSet.of(user.result.type.mesh, assigning.TRANSFER)
        if is_entry and ir.producer(op.tensor) is None:
            needed = MeshSet()
            for key in mesh_sets.use_keys(op.result, self._symbols):
                needed |= self._use_sets.cell(key).meshes
            meshes |= _inferred(needed)
        own.put(meshes)

    def _visit_call(self, op: ir.Call, operands: list[Cell | None]) -> None:
        callee = self._symbols[op.callee_name]
        changed = callee.symbol not in self._visited
        for i, given in enumerate(operands):
            arg = self._sets.cell((callee, "arg", i))
            # An argument can only be where the values of all calls can.  Sets only shrink here, so visits of
            # a callee end.
            meshes = both(None if given is None else given.found, arg.found)
            if meshes is not None:
                changed |= arg.put(meshes)
        if changed:
            self._visited.add(callee.symbol)
            self._visit(callee, is_entry=False)

    def _visit_op(self, step: _SourceStep) -> None:
        meshes = step.own.found
        operands = [None if source is None else source.found for source in step.operands]
        for operand in operands:
            meshes = both(meshes, operand)
        if meshes is not None:
            step.own.put(meshes)
            self._mark_reduction(step, meshes, operands)

    def _mark_reduction(self, step: _SourceStep, meshes: MeshSet, operands: list[MeshSet | None]) -> None:
        """Marks a reduction whose operands cannot be on one mesh, or that reduces a marked one."""
        op = step.op
        pair = mesh_sets.concat_reduce(op)
        kind = mesh_sets.reduction_of(op) if pair is None else pair[1]
        if kind is None or any(operand is not None and not operand for operand in operands):
            return
        continues = any(self._reduction_of(ir.producer(v)) == kind for v in op.operands)
        if meshes and not continues:
            return
        self._reductions[op] = kind
        if pair is not None:
            self._reductions[pair[0]] = kind
        union = MeshSet()
        for operand in operands:
            union |= operand or MeshSet()
        step.own.put(union)

    def _reduction_of(self, op: ir.Op | None) -> str | None:
        if op is None:
            return None
        marked = op.attributes.get(REDUCE)
        if marked is not None:
            return str(marked).removeprefix("#mpmd.reduction<").rstrip(">")
        return self._reductions.get(op)


def _inferred(needed: MeshSet) -> MeshSet:
    """The same meshes, because they were inferred for an input."""
    return MeshSet(tuple((mesh, (assigning.INFERRED_IN,)) for mesh in needed.names))


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
        analysis = _UseSets(ir.symbol_table(module))
        for f in mesh_sets.mpmd_functions(module):
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
    return isinstance(op, ir.Unassign) or mesh_sets.is_barrier(op) or mesh_sets.is_meshless(op)


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
        return [self.table.cell(key) for key in mesh_sets.use_keys(value, self._symbols)]

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
        # Chained calls pass a set from an argument of their callee to one of its results, and so to another
        # of its arguments: one position in each round.
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
    united = cell.meshes
    for source in sources:
        if source.found is not None:
            united |= source.found
    if united:
        cell.put(united)
    return united
