"""mpmd-merge-inferred-by-round."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.passes.fragments.merging import merge


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
        """Groups by (mesh, round), then merges each group."""
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
