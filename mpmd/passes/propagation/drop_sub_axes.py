"""mpmd-drop-sub-axes."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.sharding import shardings


class DropSubAxes(FunctionPass):
    """Restricts the shardings of values between fragments to whole axes.

        f = m1["f"] in_shardings=[[{"x":(1)2}, {"y"}]] (a) {...}  -->  in_shardings=[[{}, {"y"}]]

    Propagation splits an axis where a dim is split, as that of a batch into microbatches.  JAX cannot
    express such shardings of arrays; inside of fragments they may stay.

    Requires: shardings are attributes of fragments and transfers.
    Ensures: none of these names part of an axis.  Cost: linear in operands and results.
    Source: ours.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Every fragment and transfer, on all sides."""
        for op in ir.ops(f, (ir.Fragment, ir.Transfer)):
            for name in ("in_shardings", "out_shardings", shardings.ARGUMENT):
                old = shardings.read(op, name)
                new = [shardings.drop_sub_axes(sharding) for sharding in old]
                if new != old:
                    shardings.write(op, name, new)
