"""Passes that merge fragments without a name into others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.passes.fragments.editing import block_users, merge
from mpmd.passes.merge.visit import MergePass, fragment_users
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
    found = 0
    for value in ir.read_by(op):
        producer = ir.producer(value)
        if producer is not None:
            enters = is_free(op) and not (is_free(producer) and producer.mesh == op.mesh)
            found = max(found, rounds[producer] + enters)
    return found


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
    """Whether a result that another mesh waits for would wait for what the consumer receives."""
    if not any(isinstance(user, ir.Transfer) for user in ir.users(producer)):
        return False
    received = (ir.producer(v) for v in consumer.inputs if v not in producer.inputs)
    return any(isinstance(op, ir.Transfer) and ir.producer(op.tensor) is not None for op in received)
