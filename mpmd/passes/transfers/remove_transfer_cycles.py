"""mpmd-remove-transfer-cycles."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass


class RemoveTransferCycles(FunctionPass):
    """Uses a value itself instead of sending it away and back.

        s = transfer a to m2
        t = transfer s to m3                s = transfer a to m2
        u = transfer t to m1         -->    t = transfer s to m3
        v = transfer u to m2                return a, s
        return u, v

    A transfer is replaced by the closest value on its chain of transfers whose type (mesh,
    tensor, sharding, memory) is that of its result.  A path through host memory is kept: it may be there
    to save device memory.  Transfers that become unused stay; fragment-dce removes them.

    Requires: nothing.  Ensures: no such cycle is left.  Cost: linear times the length of chains.
    Source: openxla/shardy MPMD, `remove_transfer_cycles`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Last transfer first."""
        for transfer in reversed(ir.ops(f, ir.Transfer)):
            origin = value_that_comes_back(transfer)
            if origin is not None:
                ir.replace(transfer, [origin])


def value_that_comes_back(transfer: ir.Transfer) -> ir.Value | None:
    """The closest value on a transfer's chain with the type of its result; None if there is none."""
    op: ir.Op | None = transfer
    while isinstance(op, ir.Transfer):
        value = op.tensor
        if value.type.on_host:
            return None
        if value.type == transfer.result.type:
            return value
        op = ir.producer(value)
    return None
