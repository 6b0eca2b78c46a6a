"""mpmd-infer-mesh-rewrite-using-analysis."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mpmd import ir
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import flow, sets
from mpmd.passes.import_.infer_mesh.absorb import Absorber
from mpmd.passes.import_.infer_mesh.loops import Loop

COPIES = "mpmd.copies"


@dataclasses.dataclass(frozen=True)
class InferMeshRewriteUsingAnalysis(ir.ModulePass):
    """Puts every op into a fragment, and every value that calls pass on onto meshes.

        s = mul a c; p = assign s to m1; f = m1["f"] (p) { x = neg p; ret x }
        -->  q = assign a to m1; r = assign c to m1; f = m1["f"] (q, r) { s = mul q r; x = neg s; ret x }

    An op whose only user is a fragment is inlined there; one that few fragments use (`max-clones`), or that
    is trivial, is cloned into each; any other gets an inferred fragment per mesh.  Arguments and results of
    callees that are needed on several meshes are doubled, which `mpmd.copies` notes. Requires: use sets,
    and a use of every op.  Ensures: no meshless op; values pass between fragments through assigns and
    unassigns.  Cost: linear, but for clones.  Source: openxla/shardy MPMD, `infer_mesh_assignment`.
    """

    name: ClassVar[str] = "mpmd-infer-mesh-rewrite-using-analysis"
    max_clones: int = 1

    def rewrite(self, module: ir.Module) -> None:
        """Rewrites callees, then entry functions, whose calls follow the new signatures."""
        functions = flow.mpmd_functions(module)
        symbols = ir.symbol_table(module)
        for f in functions:
            if not f.is_public:
                _assign_results(f, symbols)
                _Body(symbols, self.max_clones).rewrite(f)
                _assign_args(f)
        for f in functions:
            if f.is_public:
                _Body(symbols, self.max_clones).rewrite(f)
        for f in functions:
            ir.return_types_changed(f)


class _Body:
    """Rewrites the block of a function or loop, last op first."""

    def __init__(self, symbols: dict[str, ir.Func], max_clones: int) -> None:
        self._symbols = symbols
        self._max_clones = max_clones

    def rewrite(self, body: ir.Func | ir.For) -> None:
        """Places the ops of a block."""
        absorber = Absorber(self._max_clones)
        for op in reversed(ir.ops(body)):
            if isinstance(op, ir.Call):
                _rewrite_call(op, self._symbols[op.callee_name])
            elif isinstance(op, ir.For):
                loop = Loop(op, self._symbols)
                loop.assign_returned()
                self.rewrite(op)
                loop.assign_all()
            elif flow.is_meshless(op):
                absorber.place(op)
        absorber.finish()


def _assign_results(f: ir.Func, symbols: dict[str, ir.Func]) -> None:
    """Assigns what a callee returns to each mesh that needs it; all but the first are new, last results."""
    returned = f.returned
    copies: dict[int, range] = {}
    for i, value in enumerate(list(returned)):
        if assigning.is_mesh_tensor(value.type):
            continue
        meshes = sets.result_use_set(f, i).names
        if not meshes:
            possible = sets.src_set_of(flow.source_key(value, symbols))
            meshes = [(possible.best() if possible else None) or min(f.topology)]
        values = [assigning.assign(value, mesh, ir.at_end(f.body)) for mesh in meshes]
        if len(values) > 1:
            copies[i] = range(len(returned), len(returned) + len(values) - 1)
        returned[i] = values[0]
        returned += values[1:]
    f.returned = returned
    _note_copies(f, "res_attrs", len(returned), copies)


def _assign_args(f: ir.Func) -> None:
    """Puts a callee's arguments on the meshes where its body needs them; further ones are new arguments."""
    copies: dict[int, range] = {}
    where = ir.at_start(f.body)
    for i, arg in enumerate(f.args):
        if assigning.is_mesh_tensor(arg.type):
            continue
        needed: dict[str, list[ir.Assign]] = {}
        for user in ir.users(arg):
            needed.setdefault(user.result.type.mesh, []).append(user)
        meshes = ir.mesh_order(needed) or sets.arg_use_set(f, i).names[:1] or [min(f.topology)]
        tensor = arg.type
        for number, mesh in enumerate(meshes):
            kind = ir.MeshTensor.get(mesh, tensor)
            there = arg if number == 0 else ir.append_arg(f.body, like=arg, kind=kind)
            if number == 0:
                ir.set_type(arg, kind)
            if mesh in needed:
                plain = assigning.unassign(there, where)
                for user in needed[mesh]:
                    ir.set_operand(user, 0, plain)
        if len(meshes) > 1:
            copies[i] = range(len(f.args) - len(meshes) + 1, len(f.args))
    _note_copies(f, "arg_attrs", len(f.args), copies)


def _note_copies(f: ir.Func, which: str, count: int, copies: dict[int, range]) -> None:
    """Notes, at each argument or result that was doubled, where the others are."""
    dicts = ir.attribute_dicts(f, which, 0)
    if not dicts and not copies:
        return
    dicts += [{} for _ in range(count - len(dicts))]
    for i, positions in copies.items():
        numbers = ", ".join(str(p) for p in positions)
        dicts[i][COPIES] = ir.Attribute.parse(f"array<i64: {numbers}>")
    ir.put_attribute_dicts(f, which, dicts)


def _copies(f: ir.Func, which: str, index: int) -> list[int]:
    dicts = ir.attribute_dicts(f, which, 0)
    attribute = dicts[index].get(COPIES) if index < len(dicts) else None
    return [] if attribute is None else [int(i) for i in ir.DenseI64ArrayAttr(attribute)]


def _rewrite_call(op: ir.Call, callee: ir.Func) -> None:
    """Calls with operands on the meshes that the callee's arguments have; results likewise."""
    where = ir.before(op)
    kinds = [arg.type for arg in callee.args]
    operands: list[ir.Value | None] = [None] * len(kinds)
    for i, value in enumerate(op.operands):
        if assigning.is_mesh_tensor(value.type):
            operands[i] = value
            continue
        for k in [i, *_copies(callee, "arg_attrs", i)]:
            operands[k] = assigning.assign(value, kinds[k], where)
    made = ir.rebuild(op, [v for v in operands if v is not None], [v.type for v in callee.returned])
    for i, old in enumerate(op.results):
        by_mesh: dict[str, ir.Value] = {}
        if assigning.is_mesh_tensor(old.type):
            ir.replace_uses(old, made.results[i])
            continue
        for k in [i, *_copies(callee, "res_attrs", i)]:
            by_mesh.setdefault(made.results[k].type.mesh, made.results[k])
        for use in list(old.uses):
            # Whatever else still reads a result was cloned into fragments and is about to be erased.
            user = use.owner
            there = by_mesh[user.result.type.mesh] if isinstance(user, ir.Assign) else made.results[i]
            plain = assigning.unassign(there, where, location=user.location)
            ir.set_operand(user, use.operand_number, plain)
    ir.erase(op)
