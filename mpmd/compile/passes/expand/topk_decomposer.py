"""hlo-topk-decomposer."""

from __future__ import annotations

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class TopkDecomposer(ComputationPass):
    """Sorts, then takes the first ones.

    (values, indices) = topk(x), k=2  ->  slices of sort(x, iota), stable, largest first

    Requires: no schedule.
    Ensures: no topk is left.
    Cost: linear; at run time n log n for n log k.
    Source: XLA's topk decomposer; equal values keep their order.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"topk": (_decompose,)}, lambda i: True)


def _decompose(site: RewriteSite) -> HloInstruction:
    (x,) = site.operands
    build, dim = site.build, x.shape.rank - 1
    places = build.iota(site.shape.elements[1].dtype, x.shape.dims, dim)
    order = _order(site, x.shape.scalar(), places.shape.scalar())
    made = build.add("sort", x, places, dimensions=(dim,), is_stable=True, called=(order,))
    results = [build.element(made, i) for i in range(2)]
    return build.tuple(
        [build.slice(r, (0,) * (dim + 1), s.dims) for r, s in zip(results, site.shape.elements)]
    )


def _order(site: RewriteSite, key: Shape, place: Shape) -> HloComputation:
    module = site.build.computation.module
    largest = bool(site.at.attributes["largest"])
    order = HloBuilder.create(module, f"{'descending' if largest else 'ascending'}_{key.dtype}")
    a, b = order.parameter(key), order.parameter(key)
    order.parameter(place), order.parameter(place)
    total = "TOTALORDER" if key.info.kind == "float" else None
    direction = "GT" if largest else "LT"
    return order.build(order.add("compare", a, b, direction=direction, comparison_type=total))
