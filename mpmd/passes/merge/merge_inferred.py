"""Fragments without a name, merged into others: with any neighbor, or those around named ones into these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.passes.fragments.editing import block_users, erase_dead_ops, in_block_order, merge, moving
from mpmd.passes.merge.visit import MergePass, fragment_users, named
from mpmd.passes.structure import constant_text, holds_complex
from mpmd.support import diagnostics


class MergeInferredByRound(FunctionPass):
    """Merges the unnamed work of each mesh that can run at one time into one fragment.

        s0 = m1[] (x); s1 = m1[] (x)              s0, s1 = m1[] (x)
        a = call body(s0); b = call body(a, s1)   a = call body(s0); b = call body(a, s1)
        u = m1[] (b); v = m1[] (u, w)        -->  v = m1[] (b, w)

    Work before, between and after the microbatches (slices, zeros, clipping, the optimizer) stays
    out of the fragments of the microbatches, so that these stay equal and compile to one program.  The
    *round* of an op is how often data must leave and re-enter unnamed work on its way there: fragments of
    one mesh and round are merged, which can never create a cycle.  Fragments that belong to a microbatch
    are left alone.  A program without microbatches is left alone.

    Requires: every value has a mesh.  Ensures: at most one such fragment per mesh and round, ops in
    dependency order.  Cost: linear.  Source: ours.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        if not has_microbatches(f):
            return
        groups: dict[tuple[str, int], list[ir.Fragment]] = {}
        rounds: dict[ir.Op, int] = {}
        for op in ir.ops(f):
            rounds[op] = _round(op, rounds)
            if is_free(op):
                groups.setdefault((op.mesh, rounds[op]), []).append(op)
        merged = [_merged(group) for group in groups.values() if len(group) > 1]
        if merged:
            ir.reorder(f, Dependencies(f).top_down())


def _merged(group: list[ir.Fragment]) -> ir.Fragment:
    makers = list(dict.fromkeys(name for fragment in group for name in fragment.inferred_by))
    merged = merge(*group)
    merged.inferred_by = makers
    return merged


def has_microbatches(f: ir.Func) -> bool:
    """Whether there are several microbatches, as calls or as fragments."""
    counters = {op.call_counter for op in ir.ops(f, (ir.Call, ir.Fragment))} - {None}
    return len(counters) > 1


def is_free(op: ir.Op) -> bool:
    """Whether it is unnamed work outside of microbatches."""
    return isinstance(op, ir.Fragment) and not op.is_user and op.call_counter is None


def _round(op: ir.Op, rounds: dict[ir.Op, int]) -> int:
    latest = 0
    for value in ir.read_by(op):
        producer = ir.producer(value)
        if producer is not None:
            enters = is_free(op) and not (is_free(producer) and producer.mesh == op.mesh)
            latest = max(latest, rounds[producer] + enters)
    return latest


class MergeInferredFragments(MergePass):
    """Merges unnamed work with its neighbours, so that it costs no program of its own.

        i, k = m1[] (a, b) { x = add a b; y = neg a; ret x, y }
        f = m1["f"] (i, a) { z = mul i a; ret z }
        -->
        k, f = m1["f"] (a, b) { x = add a b; y = neg a; z = mul x a; ret y, z }

    At least one of the two must be inferred; the halves of a split fragment stay apart, and so do gathers and
    deferred reductions.

    Attributes:
        merge_any_consumer: try all consumers in program order, not just the first.
        merge_sideways: merge with the next fragment of the mesh, whether it uses the producer or not.
        clone_inferred_fragments: give each consumer a clone of an inferred fragment of at most one op,
            so that none comes to depend on another.
        keep_microbatches_equal: keep unnamed work that belongs to no microbatch out of the fragments of
            microbatches, whose programs then stay equal; and what other meshes wait for out of fragments that
            wait for other meshes.

    Requires: values are defined before they are used.  Ensures: the same.
    Cost: linear in fragments and their uses.
    Source: openxla/shardy MPMD, `merge_inferred_fragments`; the last option is ours.
    """

    merge_any_consumer: bool = False
    merge_sideways: bool = False
    clone_inferred_fragments: bool = False
    keep_microbatches_equal: bool = False

    def rewrite(self, module: ir.Module) -> None:
        """Refuses options that exclude each other, then rewrites the functions."""
        if self.merge_sideways and (self.merge_any_consumer or self.clone_inferred_fragments):
            other = "merge-any-consumer" if self.merge_any_consumer else "clone-inferred-fragments"
            diagnostics.error(f"{self.name}: merge-sideways excludes {other}; run the pass twice instead")
            return
        super().rewrite(module)

    def rewrite_function(self, f: ir.Func) -> None:
        """Whether it applies: only with microbatches there is something to keep equal."""
        pass_ = self
        if self.keep_microbatches_equal and not has_microbatches(f):
            pass_ = dataclasses.replace(self, keep_microbatches_equal=False)
        super(MergeInferredFragments, pass_).rewrite_function(f)

    def allows(self, producer: ir.Fragment, consumer: ir.Fragment) -> bool:
        """One of the two is inferred, and they are not the halves of a split fragment."""
        if (producer.is_user and consumer.is_user) or any(_exchanges(x) for x in (producer, consumer)):
            return False
        if self.keep_microbatches_equal:
            if _in_microbatch(producer) != _in_microbatch(consumer) or _delays(producer, consumer):
                return False
        return not (producer.split_keep_transferred and consumer.split_drop_transferred)

    def candidate(self, producer: ir.Fragment, following: Iterator[ir.Fragment]) -> ir.Fragment | None:
        """The closest user, or the closest that is allowed, or the next on the mesh."""
        if self.merge_sideways:
            behind = next(following, None)
            return behind if behind is not None and self.allows(producer, behind) else None
        if self.merge_any_consumer:
            return next((c for c in fragment_users(producer) if self.allows(producer, c)), None)
        return super().candidate(producer, following)

    def part_for(self, producer: ir.Fragment, consumer: ir.Fragment) -> ir.Fragment:
        """A clone for the consumer and the function's return, if it is cheap enough."""
        if not (self.clone_inferred_fragments and _is_cheap(producer)):
            return producer
        part: ir.Fragment = ir.clone(producer, ir.before(consumer))
        for user in block_users(producer):
            if user == consumer or user.operation.name == "func.return":
                ir.replace_uses_in(producer.results[0], part.results[0], user)
        return part


def _exchanges(fragment: ir.Fragment) -> bool:
    """Whether a fragment only exchanges values between devices, which overlaps the work of others."""
    return not {"defer_reductions", "hoist_gathers"}.isdisjoint(fragment.inferred_by)


def _is_cheap(fragment: ir.Fragment) -> bool:
    if fragment.is_user or len(fragment.results) != 1:
        return False
    return len(ir.ops(fragment.body)) <= 1 and ir.is_duplicable(fragment)


def _in_microbatch(fragment: ir.Fragment) -> bool:
    return fragment.call_counter is not None


def _delays(producer: ir.Fragment, consumer: ir.Fragment) -> bool:
    """Whether a result that another mesh waits for would wait for the inputs of the consumer."""
    if not any(isinstance(user, ir.Transfer) for user in ir.users(producer)):
        return False
    received = (ir.producer(v) for v in consumer.inputs if v not in producer.inputs)
    return any(isinstance(op, ir.Transfer) and ir.producer(op.tensor) is not None for op in received)


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
            while _absorb_once(f):
                pass
        erase_dead_ops(f.body)
        if not f.is_entry:
            _report_unabsorbed(f)


def _absorb_once(f: ir.Func) -> bool:
    """Lets every root absorb all it can, last fragment first; whether any did."""
    any_merged = False
    pending = dict.fromkeys(ir.fragments(f))
    while pending:
        root, _ = pending.popitem()
        merged = False
        while is_root(root):
            inferred = inferred_producer(root) or inferred_consumer(root)
            if inferred is None:
                break
            pending.pop(inferred, None)
            root, merged = absorbed(root, inferred), True
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
    constants: dict[ir.Attribute | str, ir.Op] = {}
    behind_front = False
    for op in ir.ops(fragment.body):
        if op.operation.name != "stablehlo.constant":
            behind_front = True
            continue
        key = constant_text(op) if holds_complex(op) else op.attributes["value"]  # both have the type
        if key in constants:
            ir.replace(op, constants[key].results)
            continue
        constants[key] = op
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
