"""Assigns and unassigns, the representation of placement during import, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.fragments.editing import erase_dead_ops, in_block_order
from mpmd.passes.structure import mesh_order

USER_IN = "user_in"
USER_OUT = "user_out"
INFERRED_IN = "inferred_in"
INFERRED_OUT = "inferred_out"
INFERRED_UNUSED = "inferred_unused"
INFERRED_UNUSED_CALLEE_IN = "inferred_unused_callee_in"
INFERRED_UNUSED_CALLEE_OUT = "inferred_unused_callee_out"
CONSTRAINT_IN = "io_constraint_in"
CONSTRAINT_OUT = "io_constraint_out"
TRANSFER = "transfer"
BROADCAST = "broadcast"
BROADCAST_IN = "broadcast_in"
REDUCE = "reduce"


def assign(
    value: ir.Value,
    to: str | ir.Type,
    where: ir.InsertionPoint,
    reason: str | None = None,
    location: ir.Location | None = None,
) -> ir.Value:
    """`value`, a plain tensor, on a mesh: given by its name or as a whole mesh tensor type."""
    kind = ir.MeshTensor.get(to, value.type) if isinstance(to, str) else to
    attributes = {} if reason is None else {"origin": ir.StringAttr.get(reason)}
    return ir.create("mpmd.assign", [value], [kind], where, attributes, location or value.location).result


def unassign(
    value: ir.Value, where: ir.InsertionPoint, reason: str | None = None, location: ir.Location | None = None
) -> ir.Value:
    """`value`, a mesh tensor, as a plain tensor."""
    attributes = {} if reason is None else {"origin": ir.StringAttr.get(reason)}
    kinds = [value.type.tensor]
    return ir.create("mpmd.unassign", [value], kinds, where, attributes, location or value.location).result


def is_tensor(kind: ir.Type) -> bool:
    """Whether it is a plain tensor, without a mesh; a token is not."""
    return isinstance(kind, ir.RankedTensorType)


def is_mesh_tensor(kind: ir.Type) -> bool:
    """Whether it is a tensor on a mesh."""
    return isinstance(kind, ir.MeshTensor)


def assign_argument(
    f: ir.Func, index: int, kind: ir.Type, reason: str | None, where: ir.InsertionPoint
) -> None:
    """Gives an argument a mesh; its users use an unassign of it, created at `where`."""
    arg = f.args[index]
    used = [(use.owner, use.operand_number) for use in arg.uses]
    ir.set_type(arg, kind)
    plain = unassign(arg, where, reason)
    for owner, number in reversed(used):
        ir.set_operand(owner, number, plain)


def result_location(f: ir.Func, index: int) -> ir.Location | None:
    """The path of a result in what the user's function returns, as a location; None if not known."""
    info = f.result_attribute(index, "jax.result_info")
    return None if info is None else ir.Location.name(ir.StringAttr(info).value)


def read_from_above(op: ir.Op, captured_first: bool = False) -> list[ir.Value]:
    """The values that an op uses, its operands and the captures of its regions; each value once."""
    operands, captured = list(op.operands), _captured(op)
    return list(dict.fromkeys([*captured, *operands] if captured_first else [*operands, *captured]))


def _captured(op: ir.Op) -> list[ir.Value]:
    if not len(op.operation.regions):
        return []
    from_above = set(ir.read_by(op))
    return [v for inner in ir.walk(op)[1:] for v in inner.operands if v in from_above]


def wrap(
    op: ir.Op, mesh: str, made_by: str, replaced: Callable[[ir.Op], bool] = lambda user: True
) -> ir.Fragment:
    """A fragment, right before `op`, with a copy of it; `replaced` users take their operand from there.

    Operands are assigned to the mesh, results unassigned; tokens pass as they are.
    """
    where = ir.before(op)
    values = read_from_above(op)
    inputs = [assign(v, mesh, where, location=op.location) if is_tensor(v.type) else v for v in values]
    types = [ir.MeshTensor.get(mesh, r.type) if is_tensor(r.type) else r.type for r in op.results]

    def body(args: list[ir.Value], inside: ir.InsertionPoint) -> Sequence[ir.Value]:
        return list(ir.clone_with(op, dict(zip(values, args)), inside).results)

    made = ir.make_fragment(mesh, inputs, types, where, body, inferred_by=[made_by], location=op.location)
    for old, new in zip(op.results, made.results):
        used = [(use.owner, use.operand_number) for use in old.uses if replaced(use.owner)]
        plain = unassign(new, where, location=op.location) if is_tensor(old.type) else new
        for owner, number in reversed(used):
            ir.set_operand(owner, number, plain)
    return made


def chain_transfers(value: ir.Value, assigns: Iterable[ir.Assign]) -> None:
    """Replaces the results of assigns of one mesh tensor by transfers from mesh to mesh, in mesh order.

    All come before the first of the assigns, which stay, unused.  On its own mesh the value is used itself.
    """
    by_kind: dict[ir.Type, list[ir.Assign]] = {}
    for op in in_block_order(assigns):
        by_kind.setdefault(op.result.type, []).append(op)
    first = next(iter(by_kind.values()))[0]
    where = ir.before(first)
    made: list[tuple[ir.Assign, ir.Value]] = []
    previous = value
    meshes = mesh_order(kind.mesh for kind in by_kind)
    for kind in sorted(by_kind, key=lambda kind: meshes.index(kind.mesh)):
        if kind != value.type:
            previous = ir.make_transfer(previous, kind, where, by_kind[kind][0].location).result
        result = value if kind == value.type else previous
        made += [(op, result) for op in by_kind[kind]]
    for op, result in made:
        ir.replace_uses(op.result, result)


def use_known(op: ir.Assign, value: ir.Value) -> bool:
    """Replaces an assign of a mesh tensor by that, or a transfer of it in a block around, if there is one."""
    kind = op.result.type
    if value.type == kind:
        ir.replace_uses(op.result, value)
        return True
    for user in ir.users(value):
        if isinstance(user, ir.Transfer) and user.result.type == kind:
            around: ir.Op | None = op
            while around is not None and around.operation.block != user.operation.block:
                parent = around.operation.parent
                around = None if parent is None or parent.name == "func.func" else parent.opview
            if around is not None:
                if ir.comes_before(around, user):
                    ir.move_before(user, around)
                ir.replace_uses(op.result, user.result)
                return True
    return False


def cross_mesh_assigns(op: ir.Unassign) -> list[ir.Assign]:
    """The used assigns of an unassign's result to meshes other than its own."""
    mesh = op.tensor.type.mesh
    return [a for a in used_assigns(op.result) if a.result.type.mesh != mesh]


def used_assigns(value: ir.Value) -> list[ir.Assign]:
    """The used assigns of a value, newest first."""
    return [a for a in ir.users(value) if isinstance(a, ir.Assign) and not ir.is_unused(a)]


def remove_dead_ops(f: ir.Func | ir.For, in_fragments: bool = True) -> None:
    """Erases pure unused ops, last first, in loops too, and by default in fragments."""
    for op in reversed(ir.ops(f)):
        if ir.is_trivially_dead(op):
            ir.erase(op)
        elif isinstance(op, ir.For):
            remove_dead_ops(op, in_fragments)
        elif in_fragments and isinstance(op, ir.Fragment):
            erase_dead_ops(op.body)
