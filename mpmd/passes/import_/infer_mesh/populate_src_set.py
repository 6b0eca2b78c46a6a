"""mpmd-infer-mesh-populate-src-set."""

from __future__ import annotations

import dataclasses

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import flow
from mpmd.passes.import_.infer_mesh.sets import REDUCE, SRC_SET, USE_SET, Cell, MeshSet, Table, both


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
        """Goes forward over the entry functions."""
        analysis = _SrcSets(ir.symbol_table(module))
        for f in flow.mpmd_functions(module):
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
    captures = flow.is_meshless(op) and len(op.operation.regions)
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
        """Goes forward over an entry function."""
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
                if isinstance(op, (ir.Assign, ir.Unassign, ir.Call, ir.For)) or flow.is_meshless(op)
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
        key = flow.source_key(value, self._symbols)
        return None if key is None else self._sets.cell(key)

    def _visit_unassign(self, op: ir.Unassign, own: Cell, is_entry: bool) -> None:
        """Its mesh, then those that its operand is transferred to; for an argument, those that need it."""
        found = MeshSet.of(op.tensor.type.mesh, *([op.reason] if op.reason else []))
        for user in ir.users(op.tensor):
            if isinstance(user, ir.Transfer):
                found |= MeshSet.of(user.result.type.mesh, assigning.TRANSFER)
        if is_entry and ir.producer(op.tensor) is None:
            needed = MeshSet()
            for key in flow.use_keys(op.result, self._symbols):
                needed |= self._use_sets.cell(key).meshes
            found |= _inferred(needed)
        own.put(found)

    def _visit_call(self, op: ir.Call, operands: list[Cell | None]) -> None:
        callee = self._symbols[op.callee_name]
        changed = callee.symbol not in self._visited
        for i, given in enumerate(operands):
            arg = self._sets.cell((callee, "arg", i))
            found = both(None if given is None else given.found, arg.found)
            if found is not None:
                changed |= arg.put(found)
        if changed:
            self._visited.add(callee.symbol)
            self._visit(callee, is_entry=False)

    def _visit_op(self, step: _SourceStep) -> None:
        found = step.own.found
        operands = [None if source is None else source.found for source in step.operands]
        for operand in operands:
            found = both(found, operand)
        if found is not None:
            step.own.put(found)
            self._mark_reduction(step, found, operands)

    def _mark_reduction(self, step: _SourceStep, found: MeshSet, operands: list[MeshSet | None]) -> None:
        """Marks a reduction whose operands cannot be on one mesh, or that reduces a marked one."""
        op = step.op
        pair = flow.concat_reduce(op)
        kind = flow.reduction_of(op) if pair is None else pair[1]
        if kind is None or any(operand is not None and not operand for operand in operands):
            return
        continues = any(self._reduction_of(ir.producer(v)) == kind for v in op.operands)
        if found and not continues:
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
