"""hlo-algebraic-simplifier."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter
from mpmd.compile.passes.simplify import algebra


class AlgebraicSimplifier(ComputationPass):
    """Applies local rules until none applies: identities, compositions, work moved before broadcasts.

    multiply(x, 1) -> x;  transpose(transpose(x)) -> x;  slice(concatenate(x, y)) -> x;
    add(broadcast(a), broadcast(b)) -> broadcast(add(a, b)); ...
    The files of `simplify/algebra` list them, one function per rule.

    Requires: no schedule.
    Ensures: no rule of the table applies; values are the same up to the sign of zeros, and up to the order of
        sums.
    Cost: a worklist: linear in instructions and changes.
    Source: the rules that fire in transformer steps, as XLA's algebraic simplifier has them.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run(algebra.table(), _has_fixed_shapes)


def _has_fixed_shapes(instruction: HloInstruction) -> bool:
    return not any(s.dynamic for s in [instruction.shape, *(o.shape for o in instruction.operands)])
