"""mpmd-recompute-cheap-residuals."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.cleanup.backward_pass import BackwardPass
from mpmd.passes.fragments.residuals import Maker, given, ops_to_remake, recompute, residuals_of

_NAMES = """
    abs add and broadcast_in_dim clamp compare constant convert divide iota maximum minimum multiply negate
    not or reshape rsqrt select sign slice sqrt subtract transpose xor
"""
CHEAP = frozenset("stablehlo." + name for name in _NAMES.split())


class RecomputeCheapResiduals(BackwardPass):
    """Recomputes in a backward fragment residuals that are not worth keeping.

        y, t = m1["f"] (w, x) { t = transpose w; y = dot x t; ret y, t }
        g = m1["f"(1)] (t, d) { z = dot d t; ret z }
        -->
        y, t = m1["f"] (w, x) { t = transpose w; y = dot x t; ret y, t }
        g = m1["f"(1)] (t, d, w) { s = transpose w; z = dot d s; ret z }

    A residual is recomputed if cheap ops (data movement and arithmetic that a compiler fuses into its use)
    compute it from values that the backward fragment reads or can read without longer live ranges: its own
    operands, and arguments of the function.  `t` and its operand are left unused; fragment-dce removes them.
    Fewer bytes are then live between forward and backward of each microbatch.

    Requires: fragments in program order.  Ensures: same values.  Cost: linear times `max_ops`.  Source: ours.

    Attributes:
        max_ops: operations that one residual may take.
    """

    max_ops: int = 24

    def rewrite_fragment(self, fragment: ir.Fragment) -> None:
        """Recomputes residuals in a backward fragment."""
        residuals = residuals_of(fragment)
        have = given(fragment, residuals)
        plans = []
        makers: dict[ir.Fragment, Maker] = {}
        for position, value, maker in residuals:
            if maker not in makers:
                makers[maker] = Maker(maker)
            plan = ops_to_remake(makers[maker], value, have, _is_cheap, self.max_ops)
            if plan:
                plans.append((position, maker, plan))
            else:
                have.add(value)
        if plans:
            recompute(fragment, plans)


def _is_cheap(op: ir.Op) -> bool:
    """Whether a compiler fuses an op into its users."""
    return op.operation.name in CHEAP and not len(op.operation.regions)
