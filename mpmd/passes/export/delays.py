"""Passes that move what can wait behind what others wait for."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import in_block_order, moving


class DelayInferredFragments(FunctionPass):
    """Moves each inferred fragment to right before its first user.

    Import leaves inferred fragments at any position.  Run as late as possible they delay no user
    fragment, and their results have the shortest live ranges.

        i = m1[] (a) {...}                 g = m1["g"] (b) {...}
        g = m1["g"] (b) {...}      ->      i = m1[] (a) {...}
        f = m1["f"] (i) {...}              f = m1["f"] (i) {...}

    Requires: the order of user fragments is final.
    Ensures: each inferred fragment with users is right before the first of them, or before other
        inferred fragments that are; unused ones stay.
    Cost: linear in uses.
    Source: openxla/shardy MPMD, `delay_inferred_fragments`.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Last first, so that a chain of inferred fragments moves as a whole."""
        for fragment in reversed(ir.fragments(f)):
            if not fragment.is_user and not ir.is_unused(fragment):
                ir.move_before(fragment, in_block_order(ir.users(fragment))[0])


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
