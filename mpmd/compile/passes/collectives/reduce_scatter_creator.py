"""hlo-reduce-scatter-creator."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.collectives.positions import own_part
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import only_user


class ReduceScatterCreator(ComputationPass):
    """Lets each device have only the part of a reduction that it uses.

    dynamic-slice(all-reduce(x), position * size)  ->  reduce-scatter(x)

    Requires: no schedule.
    Ensures: no all-reduce is left whose only user takes each device's own part of one dim.
    Cost: linear; positions are computed for each device.
    Source: XLA's pass of that name; where a part begins is found by evaluating its start on every device.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"dynamic-slice": (_create,)}, lambda i: True)


def _create(site: RewriteSite) -> HloInstruction | None:
    whole = site.operands[0]
    if whole.opcode != "all-reduce" or len(whole.operands) != 1 or only_user(whole) is not site.at:
        return None
    if whole.has_control_edges:
        return None
    dim = own_part(site.at, whole)
    if dim is None:
        return None
    return site.build.add(
        "reduce-scatter",
        whole.operands[0],
        shape=site.shape,
        called=whole.called,
        dimensions=(dim,),
        channel_id=whole.channel_id,
        replica_groups=whole.attributes.get("replica_groups"),
        constrain_layout=whole.attributes.get("constrain_layout", False),
        use_global_device_ids=whole.attributes.get("use_global_device_ids", False),
    )
