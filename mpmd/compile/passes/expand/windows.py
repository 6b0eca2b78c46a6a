"""Reductions over windows, and the scatter of their gradients, as operations that kernels have.

Pooling is such a reduction.  A running sum is one, too, over all elements before each: it takes as many steps
as its length has bits.
"""

from __future__ import annotations

import math

import numpy as np

from mpmd.compile.hlo.attributes import Ints, PadDim, WindowDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.functions import applied
from mpmd.compile.passes.expand.reductions import (
    along,
    broadcast_to_results,
    is_special,
    result_of,
)
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, is_identity, reducer


class ReduceWindowRewriter(ComputationPass):
    """Computes running sums in as many steps as the length has bits.

    reduce-window(x: [n], 0), window of n, padding n-1 in front, add
      -> x = x + shifted(x, 1); x = x + shifted(x, 2); x = x + shifted(x, 4) ...

    Requires: no schedule.
    Ensures: no running sum, maximum or other reduction along one dim is left as a window over all before it.
    Cost: linear in the program; at run time n log n for n squared.
    Source: Hillis and Steele, "Data parallel algorithms", 1986.

    Attributes:
        least: shortest length that is rewritten.
    """

    least: int = 3

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"reduce-window": (self._scan,)}, lambda i: True)

    def _scan(self, site: RewriteSite) -> HloInstruction | None:
        count = len(site.operands) // 2
        x, init = site.operands[0], site.operands[count]
        running = _running_dim(site.at)
        if running is None or x.shape.dims[running[0]] < self.least:
            return None
        dim, forward = running
        opcode = reducer(site.at.to_apply) if count == 1 else None
        if opcode is None or not is_identity(opcode, init) or x.shape.logical is not site.shape.logical:
            return None
        step = 1
        while step < x.shape.dims[dim]:
            x = site.build.add(opcode, x, _moved(site, x, init, dim, step if forward else -step))
            step *= 2
        return x


def _moved(site: RewriteSite, x: HloInstruction, filler: HloInstruction, dim: int, by: int) -> HloInstruction:
    padding = [PadDim(by, -by) if d == dim else PadDim(0, 0) for d in range(x.shape.rank)]
    return site.build.pad(x, filler, padding)


def _running_dim(windowed: HloInstruction) -> tuple[int, bool] | None:
    """The dim along which the window covers everything before (or, reversed, after) an element.

    A result of the operand's dims leaves no other size to a window that is padded so.
    """
    running = None
    for d, (w, n) in enumerate(zip(windowed.window.dims, windowed.operands[0].shape.dims)):
        if w.stride != 1 or w.lhs_dilation != 1 or w.rhs_dilation != 1:
            return None
        if w.size == 1 and not (w.pad_low or w.pad_high):
            continue
        sides = (w.pad_low, w.pad_high)
        if running is not None or sides not in ((n - 1, 0), (0, n - 1)):
            return None
        running = (d, sides[0] > 0)
    return running


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


class SelectAndScatterExpander(ComputationPass):
    """Computes the gradient of pooling by slices, selects and pads.

    select-and-scatter(x, source, 0), window of k elements, select GE, scatter add
      -> which element of each window wins, from k slices of x; the sum of k padded arrays, each with the
         source where that element won

    Requires: no schedule; maps are inlined afterwards if the selection is not a plain comparison.
    Ensures: no select-and-scatter by addition is left whose window has `most` elements or fewer.
    Cost: linear in the window's elements.
    Source: the definition; the first of equal elements wins.

    Attributes:
        most: elements of a window up to which it is expanded.
    """

    most: int = 64

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"select-and-scatter": (self._expand,)}, lambda i: True)

    def _expand(self, site: RewriteSite) -> HloInstruction | None:
        window = site.at.window
        plain = all(
            w.lhs_dilation == w.rhs_dilation == 1 and not w.reversed and min(w.pad_low, w.pad_high) >= 0
            for w in window.dims
        )
        if not plain or math.prod(window.sizes) > self.most or reducer(site.at.called[1]) != "add":
            return None
        winner = _winner(site)
        return _sum(site, winner)


def _padding(site: RewriteSite) -> list[PadDim]:
    return [PadDim(w.pad_low, w.pad_high) for w in site.at.window.dims]


def _seen(site: RewriteSite, value: HloInstruction, offset: Ints) -> HloInstruction:
    """The elements of each window at one of its offsets."""
    strides = [w.stride for w in site.at.window.dims]
    counts = site.operands[1].shape.dims
    limits = [at + (n - 1) * s + 1 if n else at for at, n, s in zip(offset, counts, strides)]
    return site.build.slice(value, offset, limits, strides)


def _winner(site: RewriteSite) -> HloInstruction:
    """The number of the element that each window selects, -1 for a window over nothing but padding."""
    build, x = site.build, site.operands[0]
    counts = site.operands[1].shape.dims
    padding = _padding(site)
    padded = any(p != PadDim(0, 0) for p in padding)
    inside = None
    if padded:
        there = build.full(True, "pred", x.shape.dims)
        inside = build.pad(there, build.constant(False), padding)
        x = build.pad(x, build.full(0, x.shape.dtype, ()), padding)
    best: HloInstruction | None = None
    winner = build.full(-1, "s32", counts)
    for number, offset in enumerate(np.ndindex(*site.at.window.sizes)):
        part = _seen(site, x, offset)
        take = build.full(True, "pred", counts) if inside is None else _seen(site, inside, offset)
        if best is not None:
            some = build.compare(winner, build.full(0, "s32", counts), "GE")
            keep = build.add("and", some, _preferred(site, best, part))
            take = build.add("and", take, build.add("not", keep))
        best = part if best is None else build.select(take, part, best)
        winner = build.select(take, build.full(number, "s32", counts), winner)
    return winner


def _preferred(site: RewriteSite, best: HloInstruction, part: HloInstruction) -> HloInstruction:
    select = site.at.called[0]
    root = select.root
    if root.opcode == "compare" and root.operands == select.parameters:
        return site.build.like(root, (best, part))
    dims = tuple(range(best.shape.rank))
    return site.build.add("map", best, part, dimensions=dims, called=(select,))


def _sum(site: RewriteSite, winner: HloInstruction) -> HloInstruction:
    """The sum over a window's elements of the sources that they won, each where it came from."""
    build = site.build
    x, source, init = site.operands
    zero = build.constant(0, source.shape.dtype)
    zeros = build.broadcast(zero, source.shape.dims)
    padding = _padding(site)
    sizes = [p.padded(n) for p, n in zip(padding, x.shape.dims)]
    total: HloInstruction | None = None
    for number, offset in enumerate(np.ndindex(*site.at.window.sizes)):
        won = build.compare(winner, build.full(number, "s32", source.shape.dims), "EQ")
        part = build.select(won, source, zeros)
        sides = []
        for at, n, size, w in zip(offset, source.shape.dims, sizes, site.at.window.dims):
            covered = (n - 1) * w.stride + 1 if n else 0
            sides.append(PadDim(at, size - at - covered, w.stride - 1))
        placed = build.pad(part, zero, sides)
        total = placed if total is None else build.add("add", total, placed)
    assert total is not None
    starts = [p.low for p in padding]
    total = build.slice(total, starts, [a + n for a, n in zip(starts, x.shape.dims)])
    return build.add("add", build.broadcast(init, x.shape.dims), total)
