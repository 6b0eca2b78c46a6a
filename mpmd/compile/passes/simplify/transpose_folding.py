"""hlo-transpose-folding."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.attributes import DotDims, Ints
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, Site


@dataclasses.dataclass(frozen=True)
class TransposeFolding(ComputationPass):
    """Lets a matrix product read its operands before their transposes.

    dot(transpose(x), y), lhs_contracting_dims={1} -> dot(x, y), lhs_contracting_dims={0}

    Requires: no schedule; a backend whose products take their dims in any order.
    Ensures: no transpose feeds a dot, unless it changes the order of several free dims, which the result has.
    Cost: linear.
    Source: dimension numbers are a transpose already.
    """

    name = "hlo-transpose-folding"

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules = {"dot": (_fold,)}
        return Rewriter(computation).run(rules, lambda instruction: len(instruction.operands) == 2)


def _fold(site: Site) -> HloInstruction | None:
    a, b = site.operands
    dims = site.at.dot_dims
    if a.opcode == "transpose" and _keeps_order(a, dims.lhs_free(a.shape.rank)):
        contracting, batch = _through(a, dims.lhs_contracting), _through(a, dims.lhs_batch)
        made = DotDims(contracting, dims.rhs_contracting, batch, dims.rhs_batch)
        return site.same(a.operands[0], b, shape=site.shape, dot_dims=made)
    if b.opcode == "transpose" and _keeps_order(b, dims.rhs_free(b.shape.rank)):
        contracting, batch = _through(b, dims.rhs_contracting), _through(b, dims.rhs_batch)
        made = DotDims(dims.lhs_contracting, contracting, dims.lhs_batch, batch)
        return site.same(a, b.operands[0], shape=site.shape, dot_dims=made)
    return None


def _keeps_order(transpose: HloInstruction, free: Ints) -> bool:
    """Whether the free dims stand in the operand in the order that the result has them in."""
    places = _through(transpose, free)
    return list(places) == sorted(places)


def _through(transpose: HloInstruction, dims: Ints) -> Ints:
    """Dims of the transpose's operand."""
    return tuple(transpose.dimensions[d] for d in dims)
