"""hlo-reduction-expander."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.pointwise import applied, is_inlinable
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder
from mpmd.compile.passes.values import reducer

Values = Sequence[HloInstruction]


class ReductionExpander(ComputationPass):
    """Reduces by any computation, and several arrays at once, by joining neighbours until one is left.

    reduce(x: [n], y: [n]), to_apply=f
      -> (x, y) = f(the even elements, the odd ones): n/2 of each; again, until there is one of each

    An element that has no neighbour waits until the end.  The order is kept: f need only be associative.

    Requires: no schedule; calls are inlined.
    Ensures: no reduction is left except by an operation of two numbers, and those of computations that are
        not elementwise.
    Cost: as many copies of the computation as the length has bits; at run time linear.
    Source: a tree of halves, as every vector machine sums.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"reduce": (_expand,)}, lambda i: True)


def is_special(site: RewriteSite) -> bool:
    """Whether a reduction needs more than one operation of two numbers, and is elementwise."""
    computation = site.at.to_apply
    return (len(site.operands) > 2 or reducer(computation) is None) and is_inlinable(computation)


def result_of(site: RewriteSite, values: Values) -> HloInstruction:
    """Values in the form of a reduction's result."""
    return site.build.tuple(values) if site.shape.is_tuple else values[0]


def broadcast_to_results(site: RewriteSite, inits: Values) -> list[HloInstruction]:
    """The result of a reduction of nothing."""
    shape = site.shape.elements[0] if site.shape.is_tuple else site.shape
    return [site.build.broadcast(i, shape.dims) for i in inits]


def _expand(site: RewriteSite) -> HloInstruction | None:
    count = len(site.operands) // 2
    arrays, inits = site.operands[:count], site.operands[count:]
    build, computation = site.build, site.at.to_apply
    if count > 1 and 0 in arrays[0].shape.dims:
        return result_of(site, broadcast_to_results(site, inits))
    if not is_special(site):
        return None
    values = list(arrays)
    for d in sorted(site.at.dimensions, reverse=True):  # the last first, as elements are counted
        values = _joined(build, computation, values, d)
    begin = broadcast_to_results(site, inits)
    values = [build.reshape(v, begin[0].shape.dims) for v in values]
    return result_of(site, applied(build, computation, [*begin, *values]))


def _joined(
    build: TrackingBuilder, computation: HloComputation, values: list[HloInstruction], d: int
) -> list[HloInstruction]:
    """Values reduced along a dim, which keeps one element."""
    waiting: list[HloInstruction] = []
    while (size := values[0].shape.dims[d]) > 1:
        if size % 2:
            last = [along(build, v, d, size - 1, size) for v in values]
            waiting = applied(build, computation, [*last, *waiting]) if waiting else last
        even = [along(build, v, d, 0, size - size % 2, 2) for v in values]
        odd = [along(build, v, d, 1, size - size % 2, 2) for v in values]
        values = applied(build, computation, [*even, *odd])
    return applied(build, computation, [*values, *waiting]) if waiting else values


def along(
    build: TrackingBuilder, value: HloInstruction, d: int, start: int, limit: int, step: int = 1
) -> HloInstruction:
    """A slice of one dim."""
    dims = value.shape.dims
    if (start, limit, step) == (0, dims[d], 1):
        return value
    starts, limits, steps = [0] * len(dims), list(dims), [1] * len(dims)
    starts[d], limits[d], steps[d] = start, limit, step
    return build.slice(value, starts, limits, steps)
