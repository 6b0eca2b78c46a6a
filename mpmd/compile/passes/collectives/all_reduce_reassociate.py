"""hlo-all-reduce-reassociate."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import only_user, reducer


class AllReduceReassociate(ComputationPass):
    """Adds on each device before it adds over devices.

    add(all-reduce(x), all-reduce(y)) by add  ->  all-reduce(add(x, y))

    Requires: no schedule; the order of a sum over devices is not fixed to begin with.
    Ensures: no sum, maximum or minimum joins two all-reduces by it that are used nowhere else.
    Cost: linear.
    Source: XLA's pass of that name.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules = dict.fromkeys(("add", "maximum", "minimum"), (_join,))
        return Rewriter(computation).run(rules, lambda i: True)


def _join(site: RewriteSite) -> HloInstruction | None:
    a, b = site.operands
    if a is b or a.opcode != "all-reduce" or b.opcode != "all-reduce":
        return None
    if len(a.operands) != 1 or len(b.operands) != 1 or {only_user(a), only_user(b)} != {site.at}:
        return None
    if a.has_control_edges or b.has_control_edges:
        return None
    alike = all(
        a.attributes.get(k) == b.attributes.get(k)
        for k in ("replica_groups", "use_global_device_ids", "constrain_layout")
    )
    if not alike or (a.channel_id is None) != (b.channel_id is None):
        return None
    if {reducer(a.to_apply), reducer(b.to_apply)} != {site.at.opcode}:
        return None
    inner = site.build.add(site.at.opcode, a.operands[0], b.operands[0])
    return site.build.like(a, [inner])
