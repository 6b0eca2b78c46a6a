"""hlo-cholesky-expander."""

from __future__ import annotations

import math

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.matrices import (
    Values,
    block_size,
    column_at,
    compared,
    conjugate,
    element_at,
    is_nan_in,
    part,
    product,
    repeat,
    row_at,
    stacked,
    turned,
)
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder


class CholeskyExpander(ComputationPass):
    """Factors positive definite matrices by blocks of columns: products of those before, a loop over its own.

    cholesky(a) -> l, for each column k: p = a[k:,k] - l[k:,:k] l[k,:k]^H; l[k:,k] = p / sqrt(p[0])

    Requires: no schedule; complex numbers are split into pairs afterwards.
    Ensures: no cholesky is left.
    Cost: linear in the number of blocks, which is at most sixteen.
    Source: the left-looking form of the factorisation; a matrix that is not positive definite gives NaN.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"cholesky": (_expand,)}, lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction | None:
    build, lower = site.build, bool(site.at.attributes.get("lower", False))
    if 0 in site.shape.dims:
        return None
    a = stacked(build, site.operands[0])
    if not lower:
        a = conjugate(build, turned(build, a))
    made = _factored(build, a)
    bad = build.broadcast(is_nan_in(build, made), made.shape.dims, (0,))
    row, column = (build.iota("s32", made.shape.dims, d) for d in (1, 2))
    bad = build.add("and", bad, build.compare(row, column, "GE"))
    made = build.select(bad, build.full(math.nan, made.shape.dtype, made.shape.dims), made)
    if not lower:
        made = conjugate(build, turned(build, made))
    return build.reshape(made, site.shape.dims)


def _factored(build: TrackingBuilder, a: HloInstruction) -> HloInstruction:
    """The lower factors of a stack."""
    count, n, _ = a.shape.dims
    size = block_size(n)
    done: list[HloInstruction] = []  # blocks of columns
    for start in range(0, n, size):
        end = min(n, start + size)
        panel = part(build, a, (start, n), (start, end))
        if done:
            left = build.concatenate(done, 2)
            below, beside = (part(build, left, rows, (0, start)) for rows in ((start, n), (start, end)))
            joined = product(build, below, conjugate(build, beside), (2, 2))
            panel = build.add("subtract", panel, joined)
        made = _by_columns(build, panel)
        if start:
            made = build.concatenate([build.full(0, a.shape.dtype, (count, start, end - start)), made], 1)
        done.append(made)
    return build.concatenate(done, 2)


def _by_columns(build: TrackingBuilder, a: HloInstruction) -> HloInstruction:
    """The first columns of the lower factors of a stack, one by one; NaN where a pivot is not positive."""
    count, n, width = a.shape.dims
    dtype = a.shape.dtype

    def step(body: TrackingBuilder, i: HloInstruction, values: Values) -> Values:
        made, given = values
        places = body.iota("s32", (count, n), 1)
        above, here = compared(body, places, "LT", i), compared(body, places, "EQ", i)
        known = product(body, made, conjugate(body, row_at(body, made, i)), (2, 1))
        column = body.add("subtract", column_at(body, given, i), known)
        square = element_at(body, column, here)
        if square.shape.info.kind == "complex":  # the diagonal is real
            square = body.add("real", square)
        none, nan = (body.full(v, square.shape.dtype, (count,)) for v in (0, math.nan))
        root = body.add("sqrt", body.select(body.compare(square, none, "GT"), square, nan))
        root = body.broadcast(body.convert(root, dtype), (count, n), (0,))
        column = body.select(here, root, body.add("divide", column, root))
        column = body.select(above, body.full(0, dtype, (count, n)), column)
        zero = body.constant(0, "s32")
        column = body.reshape(column, (count, n, 1))
        return [body.dynamic_update_slice(made, column, (zero, zero, i)), given]

    return repeat(build, width, [build.full(0, dtype, a.shape.dims), a], step)[0]
