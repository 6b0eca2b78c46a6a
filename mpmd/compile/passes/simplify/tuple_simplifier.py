"""hlo-tuple-simplifier."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter
from mpmd.compile.passes.simplify.algebra import tuples


class TupleSimplifier(ComputationPass):
    """Removes tuples that are only taken apart, and those that only rebuild a tuple.

    get-tuple-element(tuple(x, y)), index=1 -> y;  tuple(t[0], t[1]) -> t
    constant((1, 2)) -> tuple(constant(1), constant(2));  copy(tuple(x, y)) -> tuple(x, y)

    Requires: no schedule.
    Ensures: no get-tuple-element reads a tuple instruction, and no constant or copy is a tuple.
    Cost: linear.
    Source: the tuple rules of the algebraic simplifier, for use where nothing else may change.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run(tuples.RULES, lambda instruction: True)
