"""hlo-reduction-dimension-grouper."""

from __future__ import annotations

import dataclasses
import math

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array, tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


@dataclasses.dataclass(frozen=True)
class ReductionDimensionGrouper(ComputationPass):
    """Joins neighbouring dims of a reduction that are all kept or all reduced, and drops those of size 1.

    reduce(x: [2,3,1,5,7]), dimensions={3,4}  ->  reshape(reduce(reshape(x): [6,35]), dimensions={1})

    Requires: row-major arrays; no schedule.
    Ensures: kept and reduced dims of each reduction alternate, none has size 1 unless all have.
    Cost: linear.
    Source: XLA's reduction dimension grouper and degenerate-dim remover: a reduction is then one of rows, of
        columns, or of both in turn.
    """

    name = "hlo-reduction-dimension-grouper"

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"reduce": (_grouped,)}, lambda i: not i.shape.dynamic)


def _grouped(site: RewriteSite) -> HloInstruction | None:
    count = len(site.operands) // 2
    dims = site.operands[0].shape.dims
    groups: list[tuple[bool, list[int]]] = []
    for d, size in enumerate(dims):
        if size == 1:
            continue
        reduced = d in site.at.dimensions
        if groups and groups[-1][0] == reduced:
            groups[-1][1].append(size)
        else:
            groups.append((reduced, [size]))
    if len(groups) == len(dims) or not any(reduced for reduced, _ in groups):
        return None
    sizes = [math.prod(members) for _, members in groups]
    kept = [n for n, (reduced, _) in zip(sizes, groups) if not reduced]
    values = [site.build.reshape(o, sizes) for o in site.operands[:count]]
    elements = site.shape.elements or (site.shape,)
    shapes = [array(s.dtype, kept) for s in elements]
    made = site.same(
        *values,
        *site.operands[count:],
        shape=tuple_of(shapes) if site.shape.is_tuple else shapes[0],
        dimensions=tuple(i for i, (reduced, _) in enumerate(groups) if reduced),
    )
    if not site.shape.is_tuple:
        return site.build.reshape(made, site.shape.dims)
    parts = [site.build.reshape(site.build.element(made, i), s.dims) for i, s in enumerate(elements)]
    return site.build.tuple(parts)
