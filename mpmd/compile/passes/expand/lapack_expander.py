"""hlo-lapack-expander."""

from __future__ import annotations

import re
from collections.abc import Callable

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.lapack_calls import options_of
from mpmd.compile.passes.expand.matrices import (
    Values,
    column_at,
    compared,
    element_at,
    is_nan_in,
    repeat,
    row_at,
    stacked,
)
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder

_TARGET = re.compile(r"lapack_[sdcz](\w+)_ffi")


class LapackExpander(ComputationPass):
    """Expands LAPACK calls for a CPU: Cholesky, triangular systems, and LU with exchanges of rows.

    custom-call(a), custom_call_target="lapack_spotrf_ffi" -> cholesky(a), beside the other half of a

    LU is a loop over columns that updates the whole matrix each time: larger matrices than `most` are left to
    the library, which works on blocks of columns.  So are those larger than `most_cholesky`, whose diagonal
    blocks, a loop over columns each, are slower than the library's.

    Requires: no schedule; cholesky and triangular-solve are expanded afterwards.
    Ensures: such calls are left only for LU and Cholesky of large matrices.
    Cost: linear.
    Source: the documentation of LAPACK's potrf, trsm and getrf.

    Attributes:
        most: rows or columns of a matrix up to which LU is expanded.
        most_cholesky: rows up to which Cholesky is.
    """

    most: int = 32
    most_cholesky: int = 320

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"custom-call": (self._expand,)}, lambda i: True)

    def _expand(self, site: RewriteSite) -> HloInstruction | None:
        found = _TARGET.fullmatch(site.at.custom_call_target)
        function = FUNCTIONS.get(found[1]) if found else None
        if function is None or 0 in site.operands[0].shape.dims:
            return None
        most = {"getrf": self.most, "potrf": self.most_cholesky}.get(found[1]) if found else None
        if most is not None and max(site.operands[0].shape.dims[-2:]) > most:
            return None
        return function(site)


def _cholesky(site: RewriteSite) -> HloInstruction:
    """The factor in one half, the operand's other half, and 1 where the matrix is not positive definite."""
    build, (a,) = site.build, site.operands
    lower = options_of(site.at).get("uplo", "L") == "L"
    made = build.add("cholesky", a, lower=lower)
    rank, dims = a.shape.rank, a.shape.dims
    row, column = (build.iota("s32", dims, rank - k) for k in (2, 1))
    joined = build.select(build.compare(row, column, "GE" if lower else "LE"), made, a)
    failed = build.convert(is_nan_in(build, stacked(build, made)), "s32")
    return build.tuple([joined, build.reshape(failed, dims[:-2])])


def _triangular_solve(site: RewriteSite) -> HloInstruction:
    options = options_of(site.at)
    return site.build.add(
        "triangular-solve",
        *site.operands[:2],
        left_side=options["side"] == "L",
        lower=options["uplo"] == "L",
        unit_diagonal=options["diag"] == "U",
        transpose_a={"N": "NO_TRANSPOSE", "T": "TRANSPOSE", "C": "ADJOINT"}[options["trans_x"]],
    )


def _lu(site: RewriteSite) -> HloInstruction:
    """L and U in one matrix, the row exchanged with each row (from 1), and the first zero pivot (from 1)."""
    build, (a,) = site.build, site.operands
    *batch, rows, columns = a.shape.dims
    stack = stacked(build, a)
    count, steps = stack.shape.dims[0], min(rows, columns)
    start = [stack, build.full(0, "s32", (count, steps)), build.full(0, "s32", (count,))]
    made, pivots, info = repeat(build, steps, start, _lu_column)
    pivots = build.reshape(pivots, (*batch, steps))
    return build.tuple([build.reshape(made, a.shape.dims), pivots, build.reshape(info, batch)])


def _lu_column(build: TrackingBuilder, i: HloInstruction, values: Values) -> Values:
    """One column: its largest element moves to the diagonal, and is eliminated from all rows below."""
    a, pivots, info = values
    (count, rows, _), dtype = a.shape.dims, a.shape.dtype
    column, place = column_at(build, a, i), build.iota("s32", (count, rows), 1)
    best = _largest(build, column, place, i)
    here = compared(build, place, "EQ", i)
    chosen = build.compare(place, build.broadcast(best, place.shape.dims, (0,)), "EQ")
    mine, other = row_at(build, a, i), _chosen_row(build, a, chosen)
    pivot = element_at(build, column, chosen)
    zero = build.compare(pivot, build.full(0, dtype, (count,)), "EQ")
    # the column with the two rows exchanged, and the factor of the pivot's row in each row below
    swapped = build.select(chosen, _spread(build, element_at(build, column, here), rows), column)
    safe = build.select(zero, build.full(1, dtype, (count,)), pivot)
    factor = build.add("divide", swapped, _spread(build, safe, rows))
    below = compared(build, place, "GT", i)
    dims = a.shape.dims
    at_mine, at_other, is_below, times = (
        build.broadcast(v, dims, (0, 1)) for v in (here, chosen, below, factor)
    )
    made = build.select(at_other, build.broadcast(mine, dims, (0, 2)), a)
    pivot_row = build.broadcast(other, dims, (0, 2))
    made = build.select(at_mine, pivot_row, made)
    less = build.add("subtract", made, build.add("multiply", times, pivot_row))
    across = build.iota("s32", dims, 2)
    changed = build.select(
        compared(build, across, "GT", i),
        less,
        build.select(compared(build, across, "EQ", i), times, made),
    )
    counts = build.add("and", is_below, build.add("not", build.broadcast(zero, dims, (0,))))
    made = build.select(counts, changed, made)
    number = build.add("add", i, build.constant(1, "s32"))
    first = build.add("and", zero, build.compare(info, build.full(0, "s32", (count,)), "EQ"))
    info = build.select(first, build.broadcast(number, (count,)), info)
    exchanged = build.add("add", best, build.full(1, "s32", (count,)))
    steps = build.iota("s32", pivots.shape.dims, 1)
    pivots = build.select(
        compared(build, steps, "EQ", i), build.broadcast(exchanged, pivots.shape.dims, (0,)), pivots
    )
    return [made, pivots, info]


def _spread(build: TrackingBuilder, value: HloInstruction, n: int) -> HloInstruction:
    return build.broadcast(value, (value.shape.dims[0], n), (0,))


def _largest(
    build: TrackingBuilder, column: HloInstruction, place: HloInstruction, i: HloInstruction
) -> HloInstruction:
    """The first row, not above i, of the largest element of each column."""
    module = build.computation.module
    size = build.add("abs", column)
    dtype, dims = size.shape.dtype, size.shape.dims
    size = build.select(compared(build, place, "LT", i), build.full(-1, dtype, dims), size)
    most = build.reduce(
        [size], [build.constant(-1, dtype)], (1,), scalar_computation(module, "maximum", dtype)
    )
    hit = build.compare(size, build.broadcast(most, dims, (0,)), "EQ")
    hit = build.add("or", hit, build.compare(size, size, "NE"))
    last = build.constant(dims[1] - 1, "s32")
    places = build.select(hit, place, build.broadcast(last, dims))
    return build.reduce([places], [last], (1,), scalar_computation(module, "minimum", "s32"))


def _chosen_row(build: TrackingBuilder, a: HloInstruction, chosen: HloInstruction) -> HloInstruction:
    """The one row of each matrix where a mask is set."""
    dtype = a.shape.dtype
    kept = build.select(build.broadcast(chosen, a.shape.dims, (0, 1)), a, build.full(0, dtype, a.shape.dims))
    total = scalar_computation(build.computation.module, "add", dtype)
    return build.reduce([kept], [build.constant(0, dtype)], (1,), total)


FUNCTIONS: dict[str, Callable[[RewriteSite], HloInstruction]] = {
    "getrf": _lu,
    "potrf": _cholesky,
    "trsm": _triangular_solve,
}
