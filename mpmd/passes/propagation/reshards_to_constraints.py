"""mpmd-reshards-to-constraints."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass


class ReshardsToConstraints(FunctionPass):
    """Turns the reshards that Shardy's pipeline created from sharding constraints back into constraints.

        %1 = sdy.reshard %0 <@mesh, [{"x"}, {}]>  ->  %1 = sdy.sharding_constraint %0 <@mesh, [{"x"}, {}]>

    Each fragment goes through propagation once more when it is compiled, with these shardings fixed at
    its arguments and results; reshards would stop that propagation, constraints guide it.

    Requires: propagation is over.  Ensures: no `sdy.reshard` is left.  Cost: linear in the module.
    Source: ours; the dialect runs Shardy's pipeline with an option that jaxlib does not offer.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """At any depth."""
        for op in ir.walk(f, ir.sdy.ReshardOp):
            made = ir.create(
                "sdy.sharding_constraint", [op.input], [op.result.type], ir.before(op),
                dict(op.attributes.items()), op.location,
            )  # fmt: skip
            ir.replace(op, [made.results[0]])
