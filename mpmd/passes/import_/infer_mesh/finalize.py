"""mpmd-infer-mesh-finalize."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import mesh_sets
from mpmd.passes.import_.infer_mesh.rewrite_using_analysis import COPIES
from mpmd.passes.structure import mesh_order
from mpmd.support import diagnostics

_MADE_BY = "infer_mesh_convert_reduce_ops"
_LEFT = (ir.Assign, ir.Unassign, ir.Broadcast)


class InferMeshFinalize(ModulePass):
    """Turns remaining assigns and unassigns into transfers, and checks that every value has a mesh.

        main(a): p = assign a to m1; q = assign a to m2; ..
        -->  main(a@m1): q = transfer a to m2; ..

    Arguments of the program, and values that the user broadcasts, are transferred to where they are needed,
    from mesh to mesh; other values only with `infer-transfers`.  On its own mesh a value is transferred only
    to the memory that the user gave a tensor: there it has another type.  A reduce is done on each mesh, then
    once more on each mesh that needs it.

    Requires: no meshless ops.  Ensures: no assign, unassign, broadcast or reduce; no sets.  Cost: linear.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.

    Attributes:
        infer_transfers: insert transfers for all values, instead of failing.
    """

    infer_transfers: bool = False

    def rewrite(self, module: ir.Module) -> None:
        functions = mesh_sets.mpmd_functions(module)
        fits = [_assign_args(f) for f in functions if f.is_public]
        if not all(fits):
            return
        for f in functions:
            assigning.remove_dead_ops(f)
            while self._rewrite_block(f, f.is_public):
                assigning.remove_dead_ops(f, in_fragments=False)
            ir.return_types_changed(f)
            _check_and_clear(f)

    def _rewrite_block(self, body: ir.Func | ir.For, is_entry: bool) -> bool:
        """One round over a block, last op first; whether it changed.  Replaced ops are left unused."""
        changed = False
        for op in reversed(ir.ops(body)):
            if isinstance(op, ir.For):
                changed |= self._rewrite_block(op, is_entry)
            elif isinstance(op, ir.Assign) and not ir.is_unused(op):
                changed |= self._rewrite_assign(op, is_entry)
            elif isinstance(op, ir.Broadcast):
                changed |= _rewrite_broadcast(op)
            elif isinstance(op, ir.Reduce):
                changed |= _rewrite_reduce(op)
        return changed

    def _rewrite_assign(self, op: ir.Assign, is_entry: bool) -> bool:
        """Replaces an assign of an unassign by a transfer, or by the value; whether that is allowed."""
        source = ir.producer(op.tensor)
        if not isinstance(source, ir.Unassign):
            return False
        value, kind = source.tensor, op.result.type
        of_argument = is_entry and ir.producer(value) is None
        if assigning.use_known(op, value):
            return True
        if not isinstance(op.operation.parent.opview, ir.Func):  # transfers cannot be in loops
            return False
        if value.type.mesh == kind.mesh:
            ir.replace_uses(op.result, ir.make_transfer(value, kind, ir.before(op), op.location).result)
        elif of_argument or self.infer_transfers:
            assigning.chain_transfers(value, assigning.cross_mesh_assigns(source))
        else:
            return False
        return True


def _assign_args(f: ir.Func) -> bool:
    """Puts arguments of an entry function on the first mesh that needs them; False after an error."""
    where = ir.at_start(f.body)
    for i, arg in enumerate(f.args):
        if not assigning.is_tensor(arg.type):
            continue
        users = [user for user in ir.users(arg) if isinstance(user, ir.Assign)]
        kinds = {user.result.type.memory_kind: None for user in users}
        if len(kinds) > 1:
            diagnostics.error(_memory_message(f, i, list(kinds)), f.location)
            return False
        if users:
            mesh = min(user.result.type.mesh for user in users)
            kind = ir.MeshTensor.get(mesh, arg.type, memory_kind=next(iter(kinds)))
            assigning.assign_argument(f, i, kind, None, where)
    return True


def _memory_message(f: ir.Func, index: int, kinds: list[str | None]) -> str:
    text = f"Argument {index} has different memory kinds assigned to it."
    if None in kinds:
        text += (
            " Found at least one user with undefined memory kind and at least one user with a memory kind."
        )
    named = ", ".join(sorted(k for k in kinds if k is not None))
    advice = "Name it once, outside, with the memory kind that all users want."
    name = ir.name_of(f.args[index].location) or f"argument {index}"
    return f"{text}\n  {name}: {named}\n  {advice}"


def _rewrite_broadcast(op: ir.Broadcast) -> bool:
    source = ir.producer(op.operands[0])
    assigns = assigning.used_assigns(op.result)
    if not isinstance(source, ir.Unassign) or not assigns:
        return False
    assigning.chain_transfers(source.tensor, assigns)
    return True


def _rewrite_reduce(op: ir.Reduce) -> bool:
    """Reduces on each mesh, then, on each mesh that needs it, the results of the others."""
    users: dict[str, list[ir.Assign]] = {}
    for user in assigning.used_assigns(op.result):
        users.setdefault(user.result.type.mesh, []).append(user)
    if not users:
        return False
    by_mesh: dict[str, list[ir.Value]] = {}
    for value in op.operands:
        source = ir.producer(value)
        if not isinstance(source, ir.Unassign):
            return False
        by_mesh.setdefault(source.tensor.type.mesh, []).append(source.tensor)
    where = ir.after(op)
    partial = [
        values[0] if len(values) == 1 else _reduced(values, mesh, op.kind, where)
        for mesh, values in ((mesh, by_mesh[mesh]) for mesh in mesh_order(by_mesh))
    ]
    for mesh in mesh_order(users):
        kind = users[mesh][0].result.type
        sent = [v if v.type == kind else ir.make_transfer(v, kind, where).result for v in partial]
        total = _reduced(sent, mesh, op.kind, where)
        for user in users[mesh]:
            ir.replace_uses(user.result, total)
    return True


def _reduced(values: list[ir.Value], mesh: str, kind: str, where: ir.InsertionPoint) -> ir.Value:
    """A fragment that reduces values of one mesh, from the left."""

    def body(args: list[ir.Value], inside: ir.InsertionPoint) -> list[ir.Value]:
        total = args[0]
        for arg in args[1:]:
            name = mesh_sets.reduction_op(kind)
            total = ir.create(name, [total, arg], [arg.type], inside, location=arg.location).results[0]
        return [total]

    location = values[0].location
    made = ir.make_fragment(
        mesh, values, [values[0].type], where, body, inferred_by=[_MADE_BY], location=location
    )
    return made.results[0]


def _check_and_clear(f: ir.Func) -> None:
    """Reports all values without a mesh; removes the attributes of inference."""
    for which in ("arg_attrs", "res_attrs"):
        mesh_sets.clear_entries(f, which, mesh_sets.USE_SET, mesh_sets.SRC_SET, COPIES)
    sides = (("input", f.args), ("output", f.returned))
    for what, values in sides:
        for i, value in enumerate(values):
            if not assigning.is_mesh_tensor(value.type):
                diagnostics.error(
                    f"function {what} {i} is not a MeshTensorType, but a {value.type}", f.location
                )
    for op in ir.walk(f):
        mesh_sets.clear(op, mesh_sets.USE_SET, mesh_sets.SRC_SET)
    for body in [f, *ir.ops(f, ir.For)]:
        for op in ir.ops(body):
            if isinstance(op, ir.For):
                mesh_sets.clear_entries(op, "arg_attrs", mesh_sets.USE_SET, mesh_sets.SRC_SET)
            elif isinstance(op, _LEFT):
                diagnostics.error(
                    "assigns, unassigns or broadcasts are not allowed after mesh inference.\n"
                    "  A value is needed on a mesh where it is not. Add an explicit transfer, or set "
                    "infer_transfers.",
                    op.location,
                )
            elif mesh_sets.is_meshless(op):
                diagnostics.error(
                    f"no more meshless ops are expected at this point.\n  There is a {op.operation.name}.\n"
                    f"Named computations inside of lax.scan, cond or while cannot be mapped: name the code "
                    "around them.",
                    op.location,
                )
