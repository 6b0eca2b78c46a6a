"""hlo-transpose-folding."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import DotDims, Ints
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class TransposeFolding(ComputationPass):
    """Folds transposes of operands into a matrix product's dimension numbers.

    dot(transpose(x), y), lhs_contracting_dims={1} -> dot(x, y), lhs_contracting_dims={0}

    Requires: no schedule; a backend whose products take their dims in any order.
    Ensures: no transpose feeds a dot, unless it changes the order of several free dims, which the result has.
    Cost: linear.
    Source: dimension numbers are a transpose already.

    Attributes:
        leading_batches: fold only where batch dims stay first, as matrix libraries need them.
    """

    leading_batches: bool = False

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules = {"dot": (self._fold,)}
        return Rewriter(computation).run(rules, lambda instruction: len(instruction.operands) == 2)

    def _fold(self, site: RewriteSite) -> HloInstruction | None:
        a, b = site.operands
        dims = site.at.dot_dims
        if a.opcode == "transpose":
            free = dims.lhs_free(a.shape.rank)
            if self._fits(a.dimensions, free, dims.lhs_batch):
                contracting, batch = _through(a, dims.lhs_contracting), _through(a, dims.lhs_batch)
                made = DotDims(contracting, dims.rhs_contracting, batch, dims.rhs_batch)
                return site.same(a.operands[0], b, shape=site.shape, dot_dims=made)
        if b.opcode == "transpose":
            free = dims.rhs_free(b.shape.rank)
            if self._fits(b.dimensions, free, dims.rhs_batch):
                contracting, batch = _through(b, dims.rhs_contracting), _through(b, dims.rhs_batch)
                made = DotDims(dims.lhs_contracting, contracting, dims.lhs_batch, batch)
                return site.same(a, b.operands[0], shape=site.shape, dot_dims=made)
        return None

    def _fits(self, order: Ints, free: Ints, batch: Ints) -> bool:
        places = [order[d] for d in free]
        if places != sorted(places):
            return False
        return not self.leading_batches or sorted(order[d] for d in batch) == list(range(len(batch)))


def _through(transpose: HloInstruction, dims: Ints) -> Ints:
    """Dims of the transpose's operand."""
    return tuple(transpose.dimensions[d] for d in dims)
