"""Products in the one form that kernels know, with the algorithm they request."""

from __future__ import annotations

import itertools
import math

from mpmd.compile.hlo.attributes import DotDims, Ints
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite

_FACTORS = {"dot_bf16_bf16_f32": "bf16", "dot_f16_f16_f32": "f16"}
"""Algorithm → the type in which it multiplies."""


class DotAlgorithmRewriter(ComputationPass):
    """Rounds the factors of a product to the type in which its algorithm multiplies.

    dot(x: f32, y: bf16), algorithm=dot_bf16_bf16_f32  ->  dot(convert(x): bf16, y), the sums in f32

    The gradient of a product of bf16 with sums in f32 has a factor in f32.  Multiplied as it is, it needs
    units for f32 where there are those for bf16.

    Requires: no schedule.
    Ensures: the factors of products with such an algorithm have its type.
    Cost: linear.
    Source: XLA's dot algorithm rewriter for GPUs; StableHLO's specification of `dot_general`.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"dot": (_rounded,)}, lambda i: not i.has_control_edges)


def _rounded(site: RewriteSite) -> HloInstruction | None:
    dtype = _FACTORS.get(str(site.at.attributes.get("algorithm", "")))
    if dtype is None or all(o.shape.dtype == dtype for o in site.operands):
        return None
    return site.same(*(site.build.convert(o, dtype) for o in site.operands), shape=site.shape)


class DotDecomposer(ComputationPass):
    """Brings the elements that a product sums over into one order by transposes and reshapes.

    dot(x: [k1,m,b,k2], y: [n,b,k2,k1])  ->  reshape(dot([b,m,k1*k2], [b,k1*k2,n]))

    Requires: no schedule.
    Ensures: each dot sums over neighbouring dims, in the same order in both factors: kernels read any
        strides.  Those that did not are `[batch.., m, k] x [batch.., k, n]` afterwards; m or n is missing
        if a side has no free dims.
    Cost: linear.
    Source: XLA's dot decomposer.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"dot": (_decompose,)}, _is_scattered)


def _is_scattered(dot: HloInstruction) -> bool:
    """Whether the summed dims are not neighbours, in the same order in both factors."""
    sides = (dot.dot_dims.lhs_contracting, dot.dot_dims.rhs_contracting)
    return len(dot.operands) == 2 and any(b != a + 1 for side in sides for a, b in itertools.pairwise(side))


def _decompose(site: RewriteSite) -> HloInstruction:
    a, b = site.operands
    dims = site.at.dot_dims
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
