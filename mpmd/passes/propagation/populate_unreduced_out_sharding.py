"""mpmd-populate-unreduced-out-sharding."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.sharding import shardings


class PopulateUnreducedOutSharding(FunctionPass):
    """Copies unreduced axes, which propagation leaves at constraints, to the results of fragments.

        m1["f"] (a) {...; c = sharding_constraint x <@mesh, [{}], unreduced={"x"}>; ret c}
        ->  m1["f"] out_shardings=[<@mesh, [{}], unreduced={"x"}>] (a) {...}

    The devices along such an axis hold terms of a sum that is taken later.

    Requires: propagation has run.
    Ensures: each returned constraint with unreduced axes has them in the out_sharding of its result; where
        a fragment had no out_shardings, its other results are replicated.  Cost: linear in results.
    Source: openxla/shardy MPMD, `populate_unreduced_out_sharding`.
    """

    runs_on = "distributed"

    def rewrite_function(self, f: ir.Func) -> None:
        """Checks the returned values of each fragment."""
        for fragment in ir.fragments(f):
            unreduced = {
                i: constraint
                for i, value in enumerate(fragment.returned)
                if (constraint := _constraint_of(value)) is not None and constraint.unreduced_axes
            }
            if not unreduced:
                continue
            results = list(fragment.results)
            mesh = next(iter(unreduced.values())).mesh_or_ref
            found = shardings.read(fragment, "out_shardings") or [
                shardings.without_axes(mesh, shardings.rank(r), is_closed=True) for r in results
            ]
            for i, constraint in unreduced.items():
                found[i] = shardings.with_unreduced_axes(found[i], constraint.unreduced_axes)
            shardings.write(fragment, "out_shardings", found)


def _constraint_of(value: ir.Value) -> ir.sdy.TensorShardingAttr | None:
    """The sharding constraint that defines `value`."""
    op = ir.producer(value)
    if isinstance(op, (ir.sdy.ShardingConstraintOp, ir.sdy.ReshardOp)):
        return ir.sdy.TensorShardingAttr(op.sharding)
    return None
