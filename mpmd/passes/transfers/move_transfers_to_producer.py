"""mpmd-move-transfers-to-producer."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.moving import moving


class MoveTransfersToProducer(FunctionPass):
    """Moves each transfer right after the op that defines its operand, or to the begin of the function.

        f = m1["f"] (a) { x = add a a; ret x }              t = transfer b to m2
        g = m1["g"] (f) { y = neg f; ret y }                f = m1["f"] (a) { x = add a a; ret x }
        s = transfer f to m2                          -->   s = transfer f to m2
        t = transfer b to m2                                u = transfer s to m3
        u = transfer s to m3                                g = m1["g"] (f) { y = neg f; ret y }

    Several transfers of one op, or of arguments, end in reverse order.

    Requires: values are defined before they are used.  Ensures: the same.  Cost: linear.
    Source: openxla/shardy MPMD, `move_transfers_to_producer`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """In program order: a transfer of a transfer follows it."""
        with moving(f):
            for transfer in ir.ops(f, ir.Transfer):
                maker = ir.producer(transfer.tensor)
                if maker is None:
                    ir.move_to_start(transfer, f.body)
                else:
                    ir.move_after(transfer, maker)
