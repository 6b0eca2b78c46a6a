"""hlo-reduce-window-expander."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import PadDim, WindowDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.pointwise import applied
from mpmd.compile.passes.expand.reduction_expander import (
    along,
    broadcast_to_results,
    is_special,
    result_of,
)
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class ReduceWindowExpander(ComputationPass):
    """Reduces windows by any computation, and of several arrays at once, dim by dim in doubling steps.

    reduce-window(x, y), window of 6 along a dim, to_apply=f
      -> two = f(x, x moved by 1); four = f(two, two moved by 2); six = f(two, four moved by 2)

    Where windows reach into padding, flags mark it: padding is ignored.  The order is kept: f need only be
    associative.

    Requires: no schedule; calls are inlined.
    Ensures: no windowed reduction is left except by an operation of two numbers, and those of computations
        that are not elementwise.
    Cost: as many copies of the computation as the window's sizes have bits, twice.
    Source: powers by squaring, of a window in place of a number.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"reduce-window": (_expand,)}, lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction | None:
    count = len(site.operands) // 2
    if not is_special(site):
        return None
    inits = broadcast_to_results(site, site.operands[count:])
    if 0 in site.operands[0].shape.dims:
        return result_of(site, inits)
    windowed = _Windowed(site)
    for d in reversed(range(len(site.at.window.dims))):
        windowed.reduce(d)
    values = applied(site.build, site.at.to_apply, [*inits, *windowed.values])
    if windowed.there is not None:
        values = [site.build.select(windowed.there, v, i) for v, i in zip(values, inits)]
    return result_of(site, values)


class _Windowed:
    """Partially reduced values.

    Attributes:
        values: the arrays, padded; along reduced dims the windows.
        there: where they are valid; None if everywhere.
    """

    def __init__(self, site: RewriteSite) -> None:
        self.site = site
        self.build = build = site.build
        arrays = site.operands[: len(site.operands) // 2]
        padding = [PadDim(w.pad_low, w.pad_high, w.lhs_dilation - 1) for w in site.at.window.dims]
        self.values = list(arrays)
        self.there: HloInstruction | None = None
        if any(p != PadDim(0, 0) for p in padding):
            self.values = [build.pad(v, build.full(0, v.shape.dtype, ()), padding) for v in arrays]
        if any(p.low > 0 or p.high > 0 or p.interior > 0 for p in padding):
            everywhere = build.full(True, "pred", arrays[0].shape.dims)
            self.there = build.pad(everywhere, build.constant(False), padding)

    def reduce(self, d: int) -> None:
        """Reduce the windows along one dim."""
        window = self.site.at.window.dims[d]
        now, size, done = self._state(), 1, 0
        result: list[HloInstruction] = []
        while True:
            if window.size & size:
                part = self._seen(now, d, done * window.rhs_dilation, window)
                result = self._joined(result, part) if result else part
                done += size
            if done == window.size:
                break
            step, length = size * window.rhs_dilation, now[0].shape.dims[d]
            if step >= length:  # the rest of the window is larger than the array: it is outside everywhere
                break
            first = [along(self.build, v, d, 0, length - step) for v in now]
            now, size = self._joined(first, [along(self.build, v, d, step, length) for v in now]), 2 * size
        self._keep(result)

    def _state(self) -> list[HloInstruction]:
        return self.values if self.there is None else [*self.values, self.there]

    def _keep(self, state: list[HloInstruction]) -> None:
        self.values = state[: len(self.values)]
        if self.there is not None:
            self.there = state[-1]

    def _seen(self, state: list[HloInstruction], d: int, start: int, w: WindowDim) -> list[HloInstruction]:
        """The reduction of each window from one of its elements on."""
        shape = self.site.shape
        count = (shape.elements[0] if shape.is_tuple else shape).dims[d]
        return [along(self.build, v, d, start, start + (count - 1) * w.stride + 1, w.stride) for v in state]

    def _joined(self, a: list[HloInstruction], b: list[HloInstruction]) -> list[HloInstruction]:
        """The combination of both, one after the other."""
        build, count = self.build, len(self.values)
        both = applied(build, self.site.at.to_apply, [*a[:count], *b[:count]])
        if self.there is None:
            return both
        first, second = a[-1], b[-1]
        both = [build.select(second, both[k], a[k]) for k in range(count)]
        both = [build.select(first, both[k], b[k]) for k in range(count)]
        return [*both, build.add("or", first, second)]
