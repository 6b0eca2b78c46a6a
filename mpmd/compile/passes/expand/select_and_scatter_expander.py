"""hlo-select-and-scatter-expander."""

from __future__ import annotations

import math

import numpy as np

from mpmd.compile.hlo.attributes import Ints, PadDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import reducer


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
        """Rewrites one computation."""
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
    """The selection, of whole arrays."""
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
