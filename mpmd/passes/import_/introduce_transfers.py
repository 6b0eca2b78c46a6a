"""mpmd-introduce-transfers."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.signatures import calls_by_callee
from mpmd.passes.import_ import assigning


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
            there = assigning.assign(arg, sources[0].tensor.type, where)
            plain = assigning.unassign(there, where)
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
        assigning.remove_dead_ops(f, in_fragments=is_first)
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
    value, others = source.tensor, assigning.cross_mesh_assigns(source)
    if assigning.use_known(op, value):
        return True
    if len(others) < 2:
        made = ir.make_transfer(value, op.result.type, ir.before(op), op.location)
        ir.replace_uses(op.result, made.result)
    else:
        assigning.chain_transfers(value, others)
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
        made = assigning.wrap(op, mesh, "introduce_transfers")
        ir.erase(op)
        for there in (ir.producer(value) for value in made.inputs):
            if isinstance(there, ir.Assign):
                _transfer(there)
