"""mpmd-infer-mesh-populate-src-set."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import flow
from mpmd.passes.import_.infer_mesh.sets import REDUCE, SRC_SET, USE_SET, Key, MeshSet, Table, both


@dataclasses.dataclass(frozen=True)
class InferMeshPopulateSrcSet(ModulePass):
    """Notes for every value on which meshes it can be without a transfer that the user did not write.

        u = unassign a@m1; s = add u b  -->  u = unassign a {src_set=m1}; s = add u b {src_set=m1}

    Forward: an op can be where all its operands can.  Arguments of the program can be wherever they are
    needed.  An op that adds up (or otherwise reduces) values that can nowhere be together becomes a
    *cross-mesh reduction*: it is marked, and can be where any of its operands can.
    Requires: use sets.  Ensures: `mpmd.src_set` on what is bound to some meshes; without it a value can be
    anywhere.  Cost: linear, times the number of calls that narrow what their callee is given.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.
    """

    name: ClassVar[str] = "mpmd-infer-mesh-populate-src-set"

    def rewrite(self, module: ir.Module) -> None:
        """Goes forward over the entry functions."""
        analysis = _SrcSets(ir.symbol_table(module))
        for f in flow.mpmd_functions(module):
            if f.is_public:
                analysis.enter(f)
        analysis.write()


class _SrcSets:
    def __init__(self, symbols: dict[str, ir.Func]) -> None:
        self._symbols = symbols
        self._sets = Table(SRC_SET)
        self._use_sets = Table(USE_SET)
        self._ops: dict[ir.Op, list[ir.Op]] = {}
        self._operands: dict[ir.Op, list[Key | None]] = {}
        self._reductions: dict[ir.Op, str] = {}
        self._visited: set[str] = set()

    def enter(self, f: ir.Func) -> None:
        """Goes forward over an entry function."""
        for i in range(len(f.args)):
            needed = self._use_sets.uses((f, "arg", i))
            if needed:
                self._sets.put((f, "arg", i), _inferred(needed))
        self._visit(f, is_entry=True)

    def write(self) -> None:
        """Puts the sets, and the marks of reductions, into attributes."""
        self._sets.write()
        for op, kind in self._reductions.items():
            ir.put(op, REDUCE, ir.Attribute.parse(f"#mpmd.reduction<{kind}>"))

    def _visit(self, body: ir.Op, is_entry: bool) -> None:
        if body not in self._ops:
            self._ops[body] = ir.ops(body)
        for op in self._ops[body]:
            if isinstance(op, ir.Unassign):
                self._visit_unassign(op, is_entry)
            elif isinstance(op, ir.Call):
                self._visit_call(op)
            elif isinstance(op, ir.For):
                for i, key in enumerate(self._keys(op)):
                    found = self._get(key)
                    if found is not None:
                        self._sets.put((op, "arg", i), found)
                self._visit(op, is_entry)
            elif isinstance(op, ir.Assign) or flow.is_meshless(op):
                self._visit_op(op)

    def _keys(self, op: ir.Op) -> list[Key | None]:
        if op not in self._operands:
            self._operands[op] = [flow.source_key(v, self._symbols) for v in op.operands]
        return self._operands[op]

    def _get(self, key: Key | None) -> MeshSet | None:
        return None if key is None else self._sets.get(key)

    def _visit_unassign(self, op: ir.Unassign, is_entry: bool) -> None:
        """Its mesh, then those that its operand is transferred to; for an argument, those that need it."""
        found = MeshSet.of(op.tensor.type.mesh, *([op.reason] if op.reason else []))
        for user in ir.users(op.tensor):
            if isinstance(user, ir.Transfer):
                found |= MeshSet.of(user.result.type.mesh, assigning.TRANSFER)
        if is_entry and ir.producer(op.tensor) is None:
            needed = MeshSet()
            for key in flow.use_keys(op.result, self._symbols):
                needed |= self._use_sets.uses(key)
            found |= _inferred(needed)
        self._sets.put(op, found)

    def _visit_call(self, op: ir.Call) -> None:
        callee = self._symbols[op.callee_name]
        changed = callee.symbol not in self._visited
        for i, key in enumerate(self._keys(op)):
            found = both(self._get(key), self._sets.get((callee, "arg", i)))
            if found is not None:
                changed |= self._sets.put((callee, "arg", i), found)
        if changed:
            self._visited.add(callee.symbol)
            self._visit(callee, is_entry=False)

    def _visit_op(self, op: ir.Op) -> None:
        found = self._sets.get(op)
        operands = [self._get(key) for key in self._keys(op)]
        for operand in operands:
            found = both(found, operand)
        if found is not None:
            self._sets.put(op, found)
            self._mark_reduction(op, found, operands)

    def _mark_reduction(self, op: ir.Op, found: MeshSet, operands: list[MeshSet | None]) -> None:
        """Marks a reduction whose operands can nowhere be together, or that takes up one that is marked."""
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
        self._sets.put(op, union)

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
