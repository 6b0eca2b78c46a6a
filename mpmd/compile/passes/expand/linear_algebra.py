"""Factorisations and triangular systems, by products of blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from mpmd.compile.hlo.attributes import DotDims
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.lapack_calls import options_of
from mpmd.compile.hlo.shape import array, tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder

Values = list[HloInstruction]
Step = Callable[[TrackingBuilder, HloInstruction, Values], Sequence[HloInstruction]]

BLOCK = 32
"""Rows that are processed one by one; larger matrices are processed in blocks, by products."""


def repeat(build: TrackingBuilder, count: int, values: Sequence[HloInstruction], step: Step) -> Values:
    """`for i in range(count): values = step(i, values)`, as a loop of the program."""
    module, shape = build.computation.module, tuple_of([array("s32"), *(v.shape for v in values)])
    condition = HloBuilder.create(module, "more")
    number = condition.element(condition.parameter(shape), 0)
    condition.build(condition.compare(number, condition.constant(count, "s32"), "LT"))
    body = TrackingBuilder(module.create_computation("step"))
    state = body.parameter(shape)
    i = body.element(state, 0)
    made = step(body, i, [body.element(state, k + 1) for k in range(len(values))])
    body.build(body.tuple([body.add("add", i, body.constant(1, "s32")), *made]))
    start = build.tuple([build.constant(0, "s32"), *values])
    loop = build.loop(condition.computation, body.computation, start)
    return [build.element(loop, k + 1) for k in range(len(values))]


def stacked(build: TrackingBuilder, value: HloInstruction) -> HloInstruction:
    *batch, rows, columns = value.shape.dims
    return build.reshape(value, (math.prod(batch), rows, columns))


def turned(build: TrackingBuilder, value: HloInstruction) -> HloInstruction:
    rank = value.shape.rank
    return build.transpose(value, (*range(rank - 2), rank - 1, rank - 2))


def conjugate(build: TrackingBuilder, value: HloInstruction) -> HloInstruction:
    if value.shape.info.kind != "complex":
        return value
    return build.add("complex", build.add("real", value), build.add("negate", build.add("imag", value)))


def part(
    build: TrackingBuilder, value: HloInstruction, rows: tuple[int, int], columns: tuple[int, int]
) -> HloInstruction:
    return build.slice(value, (0, rows[0], columns[0]), (value.shape.dims[0], rows[1], columns[1]))


def row_at(build: TrackingBuilder, value: HloInstruction, i: HloInstruction) -> HloInstruction:
    """Row i of each matrix, as `[count, columns]`."""
    count, _, columns = value.shape.dims
    zero = build.constant(0, "s32")
    return build.reshape(build.dynamic_slice(value, (zero, i, zero), (count, 1, columns)), (count, columns))


def column_at(build: TrackingBuilder, value: HloInstruction, i: HloInstruction) -> HloInstruction:
    """Column i of each matrix, as `[count, rows]`."""
    count, rows, _ = value.shape.dims
    zero = build.constant(0, "s32")
    return build.reshape(build.dynamic_slice(value, (zero, zero, i), (count, rows, 1)), (count, rows))


def compared(build: TrackingBuilder, places: HloInstruction, way: str, i: HloInstruction) -> HloInstruction:
    """Where positions compare with i."""
    return build.compare(places, build.broadcast(i, places.shape.dims), way)


def element_at(build: TrackingBuilder, vectors: HloInstruction, here: HloInstruction) -> HloInstruction:
    """The one element of each vector, `[count, n]`, where a mask is set."""
    dtype = vectors.shape.dtype
    kept = build.select(here, vectors, build.full(0, dtype, vectors.shape.dims))
    total = scalar_computation(build.computation.module, "add", dtype)
    return build.reduce([kept], [build.constant(0, dtype)], (1,), total)


def product(
    build: TrackingBuilder, a: HloInstruction, b: HloInstruction, contract: tuple[int, int]
) -> HloInstruction:
    """A product of each pair of matrices (or vectors), summed over one dim of both."""
    dims = DotDims((contract[0],), (contract[1],), (0,), (0,))
    # a factorisation loses more than the digits of one product
    return build.add("dot", a, b, dot_dims=dims, operand_precision=("highest", "highest"))


def is_nan_in(build: TrackingBuilder, value: HloInstruction) -> HloInstruction:
    """For each matrix whether it holds a NaN."""
    found = build.compare(value, value, "NE")
    any_ = scalar_computation(build.computation.module, "or", "pred")
    return build.reduce([found], [build.constant(False)], (1, 2), any_)


def block_size(n: int) -> int:
    """Rows of a block: so many that there are at most sixteen blocks."""
    return n if n <= BLOCK else max(BLOCK, -(-n // 16))


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


class CholeskyExpander(ComputationPass):
    """Factors positive definite matrices by blocks of columns: products of those before, a loop over its own.

    cholesky(a) -> l, for each column k: p = a[k:,k] - l[k:,:k] l[k,:k]^H; l[k:,k] = p / sqrt(p[0])

    Requires: no schedule; complex numbers are split into pairs afterwards.
    Ensures: no cholesky is left.
    Cost: linear in the number of blocks, which is at most sixteen.
    Source: the left-looking form of the factorisation; a matrix that is not positive definite gives NaN.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"cholesky": (_expand_cholesky,)}, lambda i: True)


def _expand_cholesky(site: RewriteSite) -> HloInstruction | None:
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


class TriangularSolveExpander(ComputationPass):
    """Solves triangular systems by blocks: a loop over the rows of each, and products of known rows.

    triangular-solve(a, b) -> x, x[k] = (b[k] - a[k,:k] x[:k]) / a[k,k] for each row k

    Blocks on the diagonal are not inverted: an inverse overflows where the solution does not.

    All other forms are brought to a lower triangle on the left, by transposing and by counting backwards.

    Requires: no schedule; complex numbers are split into pairs afterwards.
    Ensures: no triangular-solve is left.
    Cost: linear in the number of blocks, which is at most sixteen.
    Source: forward substitution, as in LAPACK.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"triangular-solve": (_expand_triangular_solve,)}, lambda i: True)


def _expand_triangular_solve(site: RewriteSite) -> HloInstruction | None:
    build, (a, b), attributes = site.build, site.operands, site.at.attributes
    if 0 in b.shape.dims:
        return None
    lower, unit = bool(attributes.get("lower", False)), bool(attributes.get("unit_diagonal", False))
    left, mode = bool(attributes.get("left_side", False)), attributes.get("transpose_a") or "NO_TRANSPOSE"
    a, b = stacked(build, a), stacked(build, b)
    if mode != "NO_TRANSPOSE":
        a, lower = turned(build, a), not lower
        a = conjugate(build, a) if mode == "ADJOINT" else a
    if not left:
        a, b, lower = turned(build, a), turned(build, b), not lower
    if not lower:
        a, b = build.add("reverse", a, dimensions=(1, 2)), build.add("reverse", b, dimensions=(1,))
    x = _substituted(build, a, b, unit)
    x = x if lower else build.add("reverse", x, dimensions=(1,))
    return build.reshape(x if left else turned(build, x), site.shape.dims)


def _substituted(build: TrackingBuilder, a: HloInstruction, b: HloInstruction, unit: bool) -> HloInstruction:
    """The solution for stacks of lower triangles and right sides."""
    _, n, columns = b.shape.dims
    size = block_size(n)
    found: list[HloInstruction] = []
    for start in range(0, n, size):
        rows = (start, min(n, start + size))
        rest = part(build, b, rows, (0, columns))
        if found:
            known = product(build, part(build, a, rows, (0, start)), build.concatenate(found, 1), (2, 1))
            rest = build.add("subtract", rest, known)
        found.append(_by_rows(build, part(build, a, rows, rows), rest, unit))
    return build.concatenate(found, 1)


def _by_rows(build: TrackingBuilder, a: HloInstruction, b: HloInstruction, unit: bool) -> HloInstruction:
    """The solution for small triangles, row by row; elements above the diagonal are not read."""
    count, n, columns = b.shape.dims
    dtype = b.shape.dtype

    def step(body: TrackingBuilder, i: HloInstruction, values: Values) -> Values:
        x, a, b = values
        row, places = row_at(body, a, i), body.iota("s32", (count, n), 1)
        before = body.select(compared(body, places, "LT", i), row, body.full(0, dtype, (count, n)))
        found = body.add("subtract", row_at(body, b, i), product(body, before, x, (1, 1)))
        if not unit:
            pivot = element_at(body, row, compared(body, places, "EQ", i))
            found = body.add("divide", found, body.broadcast(pivot, (count, columns), (0,)))
        zero = body.constant(0, "s32")
        return [body.dynamic_update_slice(x, body.reshape(found, (count, 1, columns)), (zero, i, zero)), a, b]

    return repeat(build, n, [build.full(0, dtype, b.shape.dims), a, b], step)[0]
