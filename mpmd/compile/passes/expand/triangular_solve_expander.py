"""hlo-triangular-solve-expander."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import PadDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.matrices import (
    block_size,
    conjugate,
    inverses,
    part,
    product,
    stacked,
    turned,
)
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder


class TriangularSolveExpander(ComputationPass):
    """Solves triangular systems by blocks: a loop inverts the blocks on the diagonal, products do the rest.

    triangular-solve(a, b) -> x, x[k] = inverse(a[k,k]) (b[k] - a[k,:k] x[:k]) for each block k of rows

    All other forms are brought to a lower triangle on the left, by transposing and by counting backwards.

    Requires: no schedule; complex numbers are split into pairs afterwards.
    Ensures: no triangular-solve is left.
    Cost: linear in the number of blocks, which is at most sixteen.
    Source: forward substitution; XLA's triangular solve expander inverts the diagonal blocks, too.
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
    count, n, columns = b.shape.dims
    size = block_size(n)
    blocks = -(-n // size)
    if blocks == 1:
        return product(build, inverses(build, a, unit=unit), b, (2, 1))
    diagonal = [_diagonal_block(build, a, k * size, size) for k in range(blocks)]
    inverted = inverses(build, build.concatenate(diagonal, 0), unit=unit)
    found: list[HloInstruction] = []
    for k in range(blocks):
        rows = (k * size, min(n, (k + 1) * size))
        rest = part(build, b, rows, (0, columns))
        if found:
            known = build.concatenate(found, 1)
            rest = build.add(
                "subtract", rest, product(build, part(build, a, rows, (0, rows[0])), known, (2, 1))
            )
        wide = rows[1] - rows[0]
        inverse = build.slice(inverted, (k * count, 0, 0), ((k + 1) * count, wide, wide))
        found.append(product(build, inverse, rest, (2, 1)))
    return build.concatenate(found, 1)


def _diagonal_block(build: TrackingBuilder, a: HloInstruction, start: int, size: int) -> HloInstruction:
    """A block on the diagonal; one that reaches beyond the matrix is filled up by ones on the diagonal."""
    count, n, _ = a.shape.dims
    end = min(n, start + size)
    block, gone = part(build, a, (start, end), (start, end)), start + size - end
    if not gone:
        return block
    dtype, dims = a.shape.dtype, (count, size, size)
    padding = [PadDim(0, 0), PadDim(0, gone), PadDim(0, gone)]
    block = build.pad(block, build.full(0, dtype, ()), padding)
    row, column = (build.iota("s32", dims, d) for d in (1, 2))
    beyond = build.compare(row, build.full(end - start, "s32", dims), "GE")
    ones = build.add("and", beyond, build.compare(row, column, "EQ"))
    return build.select(ones, build.full(1, dtype, dims), block)
