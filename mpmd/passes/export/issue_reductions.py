"""mpmd-issue-reductions."""

from __future__ import annotations

import collections

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.propagation.defer_reductions import REDUCTION


class IssueReductions(FunctionPass):
    """Moves each deferred reduction to where its mesh would wait for another one.

        b3 = m1["s3"(1)] (...)                b3 = m1["s3"(1)] (...)
        t  = transfer ... to m1               r  = m1[] by=defer_reductions (b3)
        b1 = m1["s1"(1)] (t)         ->       t  = transfer ... to m1
        r  = m1[] by=defer_reductions (b3)    b1 = m1["s1"(1)] (t)

    A mesh of several stages has its last gradients of one while others still compute.  Where it must wait
    then, a reduction costs no time; elsewhere it would delay work that other meshes wait for.  Waits are
    those of a step whose named fragments all take as long, and whose transfers take no time.

    Requires: the order of user fragments is final; inferred ones are as late as possible.
    Ensures: a reduction moves only to earlier, and to behind all that it reads.
    Cost: linear in the ops, times reductions.
    Source: ours; torchtitan schedules them as REDUCE_GRAD.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """In program order, so that reductions in one wait stay in order."""
        place = {op: i for i, op in enumerate(ir.ops(f))}
        waiting = _waiting(f)
        for fragment in ir.fragments(f):
            if fragment.inferred_by != [REDUCTION]:
                continue
            made = max((place[op] for v in fragment.inputs if (op := ir.producer(v)) is not None), default=0)
            for other in waiting[fragment.mesh]:
                if made < place[other] < place[fragment]:
                    ir.move_before(fragment, other)
                    break


def _waiting(f: ir.Func) -> dict[str, list[ir.Fragment]]:
    """For each mesh its named fragments, in order, that wait for values when the mesh has nothing to do."""
    found = collections.defaultdict[str, list[ir.Fragment]](list)
    free = collections.defaultdict[str, int](int)
    ends: dict[ir.Op, int] = {}
    for op in ir.ops(f):
        ready = max((ends[made] for v in ir.read_by(op) if (made := ir.producer(v)) in ends), default=0)
        if isinstance(op, ir.Fragment) and op.is_user:
            if ready > free[op.mesh]:
                found[op.mesh].append(op)
            ready = free[op.mesh] = max(ready, free[op.mesh]) + 1
        ends[op] = ready
    return found
