"""Comparisons in total order, and the largest elements."""

from __future__ import annotations

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class ComparisonExpander(ComputationPass):
    """Compares floats in total order as integers.

    compare(x, y), type=TOTALORDER -> compare(order(x), order(y)), order(x) = bits(x) ^ (sign(x) & 0x7fff...)

    Requires: no schedule.
    Ensures: no comparison of floats in total order is left.
    Cost: linear.
    Source: IEEE 754 section 5.10: flipping the bits below the sign of negative numbers orders all, NaN too.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"compare": (_expand,)}, lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction | None:
    info = site.operands[0].shape.info
    if site.at.attributes.get("comparison_type") != "TOTALORDER" or info.kind != "float" or info.bits < 8:
        return None
    dtype = f"s{info.bits}"
    a, b = (_ordered(site, x, dtype) for x in site.operands)
    return site.build.compare(a, b, site.at.direction)


def _ordered(site: RewriteSite, x: HloInstruction, dtype: str) -> HloInstruction:
    build = site.build
    bits = build.add("bitcast-convert", x, shape=x.shape.with_dtype(dtype))
    width = bits.shape.info.bits
    sign = build.add("shift-right-arithmetic", bits, build.full(width - 1, dtype, x.shape.dims))
    mask = build.full((1 << (width - 1)) - 1, dtype, x.shape.dims)
    return build.add("xor", bits, build.add("and", sign, mask))


class TopkDecomposer(ComputationPass):
    """Sorts, then takes the first ones.

    (values, indices) = topk(x), k=2  ->  slices of sort(x, iota), stable, largest first

    Requires: no schedule.
    Ensures: no topk is left.
    Cost: linear; at run time n log n for n log k.
    Source: XLA's topk decomposer; equal values keep their order.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
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
