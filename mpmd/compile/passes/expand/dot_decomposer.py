"""hlo-dot-decomposer."""

from __future__ import annotations

import itertools
import math

from mpmd.compile.hlo.attributes import DotDims, Ints
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class DotDecomposer(ComputationPass):
    """Brings matrix products to one form by transposes and reshapes.

    dot(x: [k1,m,b,k2], y: [n,b,k2,k1])  ->  reshape(dot([b,m,k1*k2], [b,k1*k2,n]))

    Requires: no schedule.
    Ensures: each dot is `[batch.., m, k] x [batch.., k, n]`; m or n is missing if a side has no free dims.
    Cost: linear.
    Source: XLA's dot decomposer; for backends that take matrices in this form only.

    Attributes:
        scattered: only products that sum over dims which are not adjacent in both factors: kernels
            that read any strides can compute all others directly.
    """

    scattered: bool = False

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""

        def wanted(dot: HloInstruction) -> bool:
            return len(dot.operands) == 2 and (not self.scattered or _is_scattered(dot.dot_dims))

        return Rewriter(computation).run({"dot": (_decompose,)}, wanted)


def _is_scattered(dims: DotDims) -> bool:
    """Whether the summed dims are not neighbours, in the same order in both factors."""
    sides = (dims.lhs_contracting, dims.rhs_contracting)
    return any(b != a + 1 for side in sides for a, b in itertools.pairwise(side))


def _decompose(site: RewriteSite) -> HloInstruction | None:
    a, b = site.operands
    dims = site.at.dot_dims
    if _is_canonical(dims, a.shape.rank, b.shape.rank):
        return None
    free_a, free_b = dims.lhs_free(a.shape.rank), dims.rhs_free(b.shape.rank)
    batch = [a.shape.dims[d] for d in dims.lhs_batch]
    depth = math.prod(a.shape.dims[d] for d in dims.lhs_contracting)
    m = [math.prod(a.shape.dims[d] for d in free_a)] if free_a else []
    n = [math.prod(b.shape.dims[d] for d in free_b)] if free_b else []
    left = _arranged(site, a, (*dims.lhs_batch, *free_a, *dims.lhs_contracting), [*batch, *m, depth])
    right = _arranged(site, b, (*dims.rhs_batch, *dims.rhs_contracting, *free_b), [*batch, depth, *n])
    count = len(batch)
    numbers = tuple(range(count))
    made = site.same(
        left,
        right,
        shape=array(site.shape.dtype, (*batch, *m, *n)),
        dot_dims=DotDims((count + len(m),), (count,), numbers, numbers),
    )
    return site.build.reshape(made, site.shape.dims)


def _arranged(site: RewriteSite, value: HloInstruction, order: Ints, dims: list[int]) -> HloInstruction:
    return site.build.reshape(site.build.transpose(value, order), dims)


def _is_canonical(dims: DotDims, rank_a: int, rank_b: int) -> bool:
    count = len(dims.lhs_batch)
    leading = tuple(range(count))
    if dims.lhs_batch != leading or dims.rhs_batch != leading or len(dims.lhs_contracting) != 1:
        return False
    few = rank_a <= count + 2 and rank_b <= count + 2
    return few and dims.lhs_contracting == (rank_a - 1,) and dims.rhs_contracting == (count,)
