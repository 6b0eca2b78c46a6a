"""Assigns and unassigns, the representation of placement during import, and the transfers they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.signatures import calls_by_callee
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

    fragment = ir.make_fragment(mesh, inputs, types, where, body, inferred_by=[made_by], location=op.location)
    for old, new in zip(op.results, fragment.results):
        used = [(use.owner, use.operand_number) for use in old.uses if replaced(use.owner)]
        plain = unassign(new, where, location=op.location) if is_tensor(old.type) else new
        for owner, number in reversed(used):
            ir.set_operand(owner, number, plain)
    return fragment


def chain_transfers(value: ir.Value, assigns: Iterable[ir.Assign]) -> None:
    """Replaces the results of assigns of one mesh tensor by transfers from mesh to mesh, in mesh order.

    All come before the first of the assigns, which stay, unused.  On its own mesh the value is used itself.
    """
    by_kind: dict[ir.Type, list[ir.Assign]] = {}
    for op in in_block_order(assigns):
        by_kind.setdefault(op.result.type, []).append(op)
    first = next(iter(by_kind.values()))[0]
    where = ir.before(first)
    placed: list[tuple[ir.Assign, ir.Value]] = []
    previous = value
    meshes = mesh_order(kind.mesh for kind in by_kind)
    for kind in sorted(by_kind, key=lambda kind: meshes.index(kind.mesh)):
        if kind != value.type:
            previous = ir.make_transfer(previous, kind, where, by_kind[kind][0].location).result
        result = value if kind == value.type else previous
        placed += [(op, result) for op in by_kind[kind]]
    for op, result in placed:
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


class IntroduceTransfers(ModulePass):
    """Replaces paths of a value from one mesh to others by transfers.

        u = unassign a; x = assign u to m3; y = assign u to m2
        -->  y = transfer a to m2; x = transfer y to m3

        u = unassign a; v = unassign b; s = add u v; x = assign s to m1
        -->  p = transfer b to m1; x = m1[] by=introduce_transfers (a, p) { add .. }

    Several meshes are reached in a chain, in mesh order.  A sum of values from several meshes, as gradients
    of a value used on several meshes are, is done where it is needed.  An argument of a callee that is
    always given a value of one mesh and memory, and is assigned in the callee, is taken to be there.

    Requires: names are mapped.  Ensures: no assign of an unassign; pure unused ops are gone.  Cost: linear.
    Source: openxla/shardy MPMD, `introduce_transfers`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """First infers the meshes of callees' arguments, then rewrites all functions."""
        symbols = ir.symbol_table(module)
        functions = [f for f in symbols.values() if f.is_mpmd and not f.is_external]
        calls = calls_by_callee(functions)
        for f in functions:
            if not f.is_public:
                _push_unassigns_in(f, calls.get(f.symbol, []), symbols)
        for f in functions:
            _rewrite(f)


def _push_unassigns_in(f: ir.Func, calls: list[ir.Call], symbols: dict[str, ir.Func]) -> None:
    """Assigns and unassigns, at the top of a callee, arguments that all come from one mesh."""
    if not calls:
        return
    for i, arg in enumerate(f.args):
        sources = [s for call in calls if (s := _unassign_of(call.operands[i], symbols)) is not None]
        if len(sources) < len(calls) or len({s.tensor.type for s in sources}) > 1:
            continue
        if any(isinstance(user, ir.Assign) for user in ir.users(arg)):
            used = [(use.owner, use.operand_number) for use in arg.uses]
            where = ir.at_start(f.body)
            there = assign(arg, sources[0].tensor.type, where)
            plain = unassign(there, where)
            for owner, number in reversed(used):
                ir.set_operand(owner, number, plain)


def _unassign_of(value: ir.Value, symbols: dict[str, ir.Func]) -> ir.Unassign | None:
    """The unassign that defines a value, perhaps in the function whose call defines it."""
    op = ir.producer(value)
    if isinstance(op, ir.Call):
        op = ir.producer(symbols[op.callee_name].terminator.operands[ir.result_index(value)])
    return op if isinstance(op, ir.Unassign) else None


def _rewrite(f: ir.Func) -> None:
    """Computes sums where they are needed and creates transfers, last assign first, until nothing changes.

    Assigns are not erased in between, only left unused.
    """
    changed = is_first = True
    while changed:
        remove_dead_ops(f, in_fragments=is_first)
        changed = is_first = False
        for op in reversed(ir.walk(f, ir.Assign)):
            if ir.is_unused(op):
                continue
            source = ir.producer(op.tensor)
            if source is not None and _is_sum_of_unassigns(source):
                _do_sum_at_target(source, op.result.type.mesh)
            changed |= _transfer(op)


def _transfer(op: ir.Assign) -> bool:
    """Replaces an assign of an unassign by a transfer, or the value itself; whether it was one."""
    source = ir.producer(op.tensor)
    if not isinstance(source, ir.Unassign):
        return False
    value, others = source.tensor, cross_mesh_assigns(source)
    if use_known(op, value):
        return True
    if len(others) < 2:
        transfer = ir.make_transfer(value, op.result.type, ir.before(op), op.location)
        ir.replace_uses(op.result, transfer.result)
    else:
        chain_transfers(value, others)
    return True


def _is_sum_of_unassigns(op: ir.Op) -> bool:
    """Whether it adds up unassigns only, each partial sum being used once."""
    todo = [op]
    while todo:
        add = todo.pop()
        if add.operation.name != "stablehlo.add" or len(ir.users(add.results[0])) != 1:
            return False
        for operand in add.operands:
            source = ir.producer(operand)
            if source is None:
                return False
            if not isinstance(source, ir.Unassign):
                todo.append(source)
    return True


def _do_sum_at_target(add: ir.Op, mesh: str) -> None:
    """Wraps the adds of a sum into fragments on a mesh, inner ones first, and transfers their operands."""
    adds = [add]
    for op in adds:
        adds += [s for v in op.operands if not isinstance(s := ir.producer(v), ir.Unassign)]
    for op in reversed(adds):
        fragment = wrap(op, mesh, "introduce_transfers")
        ir.erase(op)
        for there in (ir.producer(value) for value in fragment.inputs):
            if isinstance(there, ir.Assign):
                _transfer(there)
