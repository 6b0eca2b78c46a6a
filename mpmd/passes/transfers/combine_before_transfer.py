"""mpmd-combine-before-transfer."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.sharding.shards import local_bytes


class CombineBeforeTransfer(FunctionPass):
    """Combines values before they are sent, if they are only sent to be combined.

        s = transfer a@m1 to m0
        t = transfer b@m1 to m0              f = m1[] (a, b) { x = add a b; ret x }
        f = m0[] (s, t) { x = add a b; ret x }  -->  t = transfer f to m0

    Such sums occur where a value of m0 is used more than once on m1: its gradients are added where it was
    produced.  The pass moves unnamed fragments whose operands are transfers from one mesh, used by nothing
    else, if fewer values and no more bytes are sent then.

    Requires: no shardings in types; meshes with equal axes.  A fragment with effects stays on its mesh.
    Ensures: the number of transfers does not grow.  Cost: linear.
    Source: ours.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """First fragment first: the transfer of a sum may be an operand of the next."""
        for fragment in ir.ops(f, ir.Fragment):
            is_free = not fragment.is_user and ir.is_movable(fragment)
            if is_free and (source := _better_mesh(fragment, f.topology)):
                _move(fragment, source)


def _better_mesh(fragment: ir.Fragment, topology: ir.TopologyAttr) -> str | None:
    """The mesh of all operands, if the fragment is better placed there."""
    transfers = _operand_transfers(fragment)
    if len(transfers) < len(fragment.inputs):
        return None
    if any(user != fragment for op in transfers for user in ir.users(op)):
        return None
    sources = {op.tensor.type.mesh for op in transfers}
    kinds = [v.type for op in transfers for v in (op.tensor, op.result)] + [r.type for r in fragment.results]
    if len(sources) != 1 or any(kind.on_host or kind.sharding is not None for kind in kinds):
        return None
    mesh = topology[fragment.mesh]
    sent, instead = (
        [local_bytes(v.type, mesh) for v in values]
        for values in (dict.fromkeys(fragment.inputs), fragment.results)
    )
    if len(instead) >= len(sent) or sum(instead) > sum(sent):
        return None
    return str(sources.pop())


def _operand_transfers(fragment: ir.Fragment) -> list[ir.Transfer]:
    """The operands that are transfers, an operand that is passed twice counted twice."""
    return [op for value in fragment.inputs if isinstance(op := ir.producer(value), ir.Transfer)]


def _move(fragment: ir.Fragment, mesh: str) -> None:
    """Builds the fragment on another mesh, from the sources of its operands, and sends its results."""
    transfers = _operand_transfers(fragment)
    inputs = [op.tensor for op in transfers]
    where = ir.before(fragment)

    def body(arguments: list[ir.Value], into: ir.InsertionPoint) -> list[ir.Value]:
        return ir.clone_body(fragment.body, dict(zip(fragment.args, arguments)), into)[1]

    made = ir.make_fragment(
        mesh, inputs, [r.type.on(mesh) for r in fragment.results], where, body,
        inferred_by=fragment.inferred_by, location=fragment.location,
    )  # fmt: skip
    if fragment.call_counter is not None:
        made.call_counter = fragment.call_counter
    sent = [ir.make_transfer(r, old.type, where) for r, old in zip(made.results, fragment.results)]
    ir.replace(fragment, [op.result for op in sent])
    for op in dict.fromkeys(transfers):
        ir.erase(op)
