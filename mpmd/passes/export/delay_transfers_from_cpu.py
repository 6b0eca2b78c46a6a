"""mpmd-delay-transfers-from-cpu."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.block_order import in_block_order
from mpmd.passes.fragments.moving import moving


class DelayTransfersFromCpu(FunctionPass):
    """Moves each transfer out of host memory to right before its first user.

    Host memory is plentiful and device memory is not: a value that is loaded late occupies the device for a
    shorter time.

        t = transfer h to m1               f = m1["f"] (a) {...}
        f = m1["f"] (a) {...}      ->      t = transfer h to m1
        g = m1["g"] (t) {...}              g = m1["g"] (t) {...}

    Requires: the order of fragments is final.
    Ensures: each transfer with users whose operand is on a mesh that ends in `/cpu`, or in the host
        memory of its mesh, is right before the first of them; unused ones stay.
    Cost: linear in uses.
    Source: openxla/shardy MPMD, `delay_transfers_from_cpu`.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """In program order."""
        with moving(f):
            for transfer in ir.ops(f, ir.Transfer):
                source = transfer.tensor.type
                on_host = source.mesh.endswith("/cpu") or source.on_host
                if on_host and not ir.is_unused(transfer):
                    ir.move_before(transfer, in_block_order(ir.users(transfer))[0])
