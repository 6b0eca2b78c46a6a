"""mpmd-absorb-inferred-fragments."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.constants import constant_text, holds_complex
from mpmd.passes.fragments.editing import block_users, erase_dead_ops, in_block_order, merge, moving
from mpmd.passes.merge.visit import named
from mpmd.support import diagnostics

_OWN = {"mesh_name", "origin", "stage_id"}
_PER_VALUE = {"in_shardings", "out_shardings", "arg_attrs", "res_attrs"}


class AbsorbInferredFragments(FunctionPass):
    """Absorbs unnamed neighbours into named fragments, so that a callee keeps the shape the user gave it.

        p = m1[] (a) { x = add a a; ret x }                    p, c = m1["f"] cc=1 (a) {
        t = transfer p to m2                                     x = add a a; y = mul x x; z = neg y
        f = m1["f"] cc=1 (p) { y = mul p p; ret y }     -->      ret x, z }
        c = m1[] (f) { z = neg f; ret z }                      t = transfer p to m2

    A *root* is a fragment that is named, or has no fragment user, or reads no fragment's result.  It absorbs
    each inferred fragment whose first user it is, and each of which it is the last producer; transfers that
    are in between move first, unused ones of them are removed.  Two named fragments are never merged.  The
    result has the attributes of the root; constants in it come first.  Dead fragments and ops are removed:
    they must not keep others apart.

    Attributes:
        absorb_on_entry_point_function: absorb in entry points too, not in callees alone.

    Requires: values are defined before they are used.  Ensures: the same.  Remarks name unabsorbed work in
        callees.  Cost: linear in uses per round; a round more for each inferred fragment that becomes a root.
    Source: openxla/shardy MPMD, `absorb_inferred_fragments`.
    """

    runs_on = "mpmd"
    absorb_on_entry_point_function: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Rounds over all fragments, until one changes nothing."""
        if f.is_entry and not self.absorb_on_entry_point_function:
            return
        erase_dead_ops(f.body)
        with moving(f):
            while _round(f):
                pass
        erase_dead_ops(f.body)
        if not f.is_entry:
            _report_unabsorbed(f)


def _round(f: ir.Func) -> bool:
    """Lets every root absorb all it can, last fragment first; whether any did."""
    any_merged = False
    pending = dict.fromkeys(ir.fragments(f))
    while pending:
        root, _ = pending.popitem()
        merged = False
        while is_root(root):
            found = inferred_producer(root) or inferred_consumer(root)
            if found is None:
                break
            pending.pop(found, None)
            root, merged = absorbed(root, found), True
        if merged:
            _constants_first(root)
            any_merged = True
    return any_merged


def is_root(fragment: ir.Fragment) -> bool:
    """Whether it may absorb: named, or without fragment users, or reading no fragment's result."""
    if fragment.is_user:
        return True
    if not any(isinstance(user, ir.Fragment) for user in ir.users(fragment)):
        return True
    return not any(isinstance(ir.producer(v), ir.Fragment) for v in fragment.inputs)


def inferred_producer(root: ir.Fragment) -> ir.Fragment | None:
    """The first inferred producer whose first user is the root; moves transfers out of the way."""
    makers = (ir.producer(v) for v in root.inputs)
    for producer in dict.fromkeys(m for m in makers if isinstance(m, ir.Fragment)):
        if producer.is_user:
            continue
        for user in ir.users(producer):
            if isinstance(user, ir.Transfer) and ir.is_unused(user):
                ir.erase(user)
            elif isinstance(user, ir.Transfer):
                ir.move_before(user, in_block_order(block_users(user))[0])
        if all(user == root or ir.comes_before(root, user) for user in block_users(producer)):
            return producer
    return None


def inferred_consumer(root: ir.Fragment) -> ir.Fragment | None:
    """The first inferred consumer whose last producer is the root; moves transfers out of the way."""
    for consumer in dict.fromkeys(ir.users(root)):
        if isinstance(consumer, ir.Fragment) and not consumer.is_user:
            makers = [ir.producer(v) for v in consumer.inputs]
            for maker in makers:
                if isinstance(maker, ir.Transfer):
                    _hasten(maker)
            if all(m is None or m == root or ir.comes_before(m, root) for m in makers):
                return consumer
    return None


def _hasten(transfer: ir.Transfer) -> None:
    maker = ir.producer(transfer.tensor)
    if maker is None:
        ir.move_to_start(transfer, transfer.operation.block)
    else:
        ir.move_after(transfer, maker)


def absorbed(root: ir.Fragment, other: ir.Fragment) -> ir.Fragment:
    """The two merged at the position of the root, with the attributes of the root."""
    kept = {
        name: attribute
        for name, attribute in root.attributes.items()
        if name not in _OWN | _PER_VALUE and not name.startswith("mpmd.control_")
    }
    makers = [] if root.is_user else list(dict.fromkeys([*root.inferred_by, *other.inferred_by]))
    if ir.comes_before(other, root):
        merged = merge(other, root)
    else:
        ir.move_after(other, root)
        merged = merge(root, other)
    for name, attribute in kept.items():
        ir.put(merged, name, attribute)
    if makers:
        merged.inferred_by = makers
    return merged


def _constants_first(fragment: ir.Fragment) -> None:
    """Moves constants to the front of the body, where equal ones become one."""
    found: dict[ir.Attribute | str, ir.Op] = {}
    behind_front = False
    for op in ir.ops(fragment.body):
        if op.operation.name != "stablehlo.constant":
            behind_front = True
            continue
        key = constant_text(op) if holds_complex(op) else op.attributes["value"]  # both have the type
        if key in found:
            ir.replace(op, found[key].results)
            continue
        found[key] = op
        if behind_front:
            ir.move_to_start(op, fragment.body)


def _report_unabsorbed(f: ir.Func) -> None:
    for fragment in ir.fragments(f):
        if not fragment.is_user:
            diagnostics.notice(
                f'unnamed work on mesh "{fragment.mesh}" was not absorbed by {_neighbours(fragment)}; '
                "it costs one program for each microbatch",
                fragment.location,
            )


def _neighbours(fragment: ir.Fragment) -> str:
    makers = [ir.producer(v) for v in fragment.inputs]
    near = dict.fromkeys(op for op in [*makers, *ir.users(fragment)] if isinstance(op, ir.Fragment))
    return "; ".join(map(named, near)) or "any fragment, as it has no neighbour on its mesh"
