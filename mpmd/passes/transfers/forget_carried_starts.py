"""mpmd-forget-carried-starts."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.transfers.uniquify_carried_values import START


class ForgetCarriedStarts(FunctionPass):
    """Drops the numbered barriers that kept equal start values apart.

        x, y = m1[] () { c = const 0; p = barrier c {start = 0}; q = barrier c {start = 1}; ret p, q }
        -->
        x, y = m1[] () { c = const 0; ret c, c }

    The numbers differ from stage to stage; without them, identical stages start with one program.

    Requires: no pass that joins equal results comes after it.  Ensures: no `mpmd.start`.  Cost: linear.
    Source: ours.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """Visits every op, in fragments too."""
        for op in ir.walk(f):
            if op.operation.name == "stablehlo.optimization_barrier" and START in op.attributes:
                ir.replace(op, list(op.operands))
