"""Post-order: the operands of an instruction run shortly before it."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.schedule.heap import Heap


def post_order(computation: HloComputation, heap: Heap) -> list[HloInstruction]:
    """Operands before users, in the order in which they are named.

    Source: XLA's post-order memory scheduler.
    """
    return computation.post_order()
