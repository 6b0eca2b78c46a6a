"""hlo-dot-dimension-merger."""

from __future__ import annotations

import itertools
import math

from mpmd.compile.hlo.attributes import DotDims, Ints
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite

Runs = list[list[int]]


class DotDimensionMerger(ComputationPass):
    """Merges neighbouring dims of a matrix product that have the same role, by reshapes alone.

    dot(x: [b,t,d], y: [d,h,w])  ->  reshape(dot([b*t,d], [d,h*w]))

    Requires: no schedule.
    Ensures: no two neighbouring free dims of a dot; no two batch or contracted dims that are neighbours, in
        the same order, on both sides.
    Cost: linear.
    Source: a reshape of row-major neighbours moves nothing, so that a product needs fewer loops for free.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"dot": (_merge,)}, lambda i: len(i.operands) == 2)


def _merge(site: RewriteSite) -> HloInstruction | None:
    a, b = site.operands
    dims = site.at.dot_dims
    both = [*zip(dims.lhs_batch, dims.rhs_batch), *zip(dims.lhs_contracting, dims.rhs_contracting)]
    links: set[tuple[int, int]] = set()
    for pairs in (both[: len(dims.lhs_batch)], sorted(both[len(dims.lhs_batch) :])):
        links |= {p for p, q in itertools.pairwise(pairs) if q == (p[0] + 1, p[1] + 1)}
    runs_a = _runs(a.shape.rank, dims.lhs_free(a.shape.rank), {x for x, _ in links})
    runs_b = _runs(b.shape.rank, dims.rhs_free(b.shape.rank), {y for _, y in links})
    if len(runs_a) == a.shape.rank and len(runs_b) == b.shape.rank:
        return None
    place_a, place_b = _places(runs_a), _places(runs_b)
    firsts = {run[0] for run in runs_a}
    merged = DotDims(
        tuple(place_a[d] for d in dims.lhs_contracting if d in firsts),
        tuple(place_b[e] for d, e in zip(dims.lhs_contracting, dims.rhs_contracting) if d in firsts),
        tuple(place_a[d] for d in dims.lhs_batch if d in firsts),
        tuple(place_b[e] for d, e in zip(dims.lhs_batch, dims.rhs_batch) if d in firsts),
    )
    left, right = _merged(site, a, runs_a), _merged(site, b, runs_b)
    result = [left.shape.dims[d] for d in (*merged.lhs_batch, *merged.lhs_free(len(runs_a)))]
    result += [right.shape.dims[d] for d in merged.rhs_free(len(runs_b))]
    made = site.same(left, right, shape=array(site.shape.dtype, result), dot_dims=merged)
    return site.build.reshape(made, site.shape.dims)


def _runs(rank: int, free: Ints, linked: set[int]) -> Runs:
    """Runs of dims that become one; `linked` dims join the next one."""
    runs: Runs = []
    for d in range(rank):
        if runs and (d - 1 in linked or (d in free and d - 1 in free)):
            runs[-1].append(d)
        else:
            runs.append([d])
    return runs


def _places(runs: Runs) -> dict[int, int]:
    return {d: i for i, run in enumerate(runs) for d in run}


def _merged(site: RewriteSite, value: HloInstruction, runs: Runs) -> HloInstruction:
    return site.build.reshape(value, [math.prod(value.shape.dims[d] for d in run) for run in runs])
