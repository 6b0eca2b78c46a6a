"""hlo-triangular-solve-expander."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.matrices import (
    Values,
    block_size,
    compared,
    conjugate,
    element_at,
    part,
    product,
    repeat,
    row_at,
    stacked,
    turned,
)
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder


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
        """Rewrites one computation."""
        return Rewriter(computation).run({"triangular-solve": (_expand,)}, lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction | None:
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
