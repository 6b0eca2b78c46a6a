"""Plans of matrix products: `MatmulPlan` for a batch of them, `AttentionPlan` for products of products.

    sums[b, m, n] = sum over k of a[b, m, k] · b[b, k, n]                  matmul, on strided arrays

Without an epilogue the sums are the result; with one they are an operand of a plan over `batch, m, n`.

    sums_i[b, q, k] = sum over d of a_i[b, q, d] · b_i[b, d, k]            attention: scores
    rows: a plan over (b, q | k) that reads the sums and writes factors    softmax, its gradient, masks
    c_j[b, q, n] = sum over k of x_j[b, q, k] · w_j[b, k, n]               mixtures over keys
    c_j[b, k, n] = sum over q of x_j[b, q, k] · w_j[b, q, n]               mixtures over queries

A kernel of attention iterates over blocks of queries: only the sums and the factors of one block exist at a
time, so scores never leave the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.masking import Triangle, triangle_of


@dataclass(frozen=True)
class View:
    """A matrix, or one per batch index, inside of an array.

    Attributes:
        dtype: element type in memory.
        offset: elements before the first.
        row, column: distances in elements.
        batch: distance for each batch dim, outermost first.
    """

    dtype: str
    offset: int
    row: int
    column: int
    batch: tuple[int, ...] = ()

    def span(self, batch: Iterable[int], rows: int, columns: int) -> int:
        """Elements from the first of the array to the last of matrices of some size."""
        steps = zip((*batch, rows, columns), (*self.batch, self.row, self.column))
        return self.offset + sum((extent - 1) * step for extent, step in steps) + 1


@dataclass(frozen=True)
class MatmulPlan:
    """The computation of one matrix-product kernel.

    Attributes:
        name: symbol of the kernel.
        batch: sizes of the batch dims.
        m, n, k: rows, columns, length of the sums.
        a, b, c: views of the factors and the result; c is not used with an epilogue.
        epilogue: a plan of kind `loop` over `batch, m, n`; None stores the sums into c.
        sums: number of the epilogue's operand for the sums.
        exact: factors of f32 are multiplied with all of their digits, by the precision or the algorithm.
    """

    name: str
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: View
    b: View
    c: View
    epilogue: KernelPlan | None = None
    sums: int = 0
    exact: bool = False

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.batch) * self.m * self.n * self.k

    def text(self) -> str:
        sizes = "x".join(map(str, (*self.batch, self.m, self.n, self.k)))
        lines = [f"matmul {self.name} {sizes}{' exact' * self.exact}"]
        for name, view in (("a", self.a), ("b", self.b), ("c", self.c)):
            strides = ":".join(map(str, (*view.batch, view.row, view.column)))
            lines.append(f"  {name}: {view.dtype}+{view.offset} [{strides}]")
        text = "\n".join(lines) + "\n"
        if self.epilogue is not None:
            text += f"  sums are p{self.sums} of\n" + self.epilogue.text()
        return text


KEYS, QUERIES = "keys", "queries"


@dataclass(frozen=True)
class Scores:
    """A product that the rows read.

    Attributes:
        depth: length of its sums.
        a: `[queries, depth]`.
        b: `[depth, keys]`.
        sums: number of the rows' operand for them.
    """

    depth: int
    a: View
    b: View
    sums: int


@dataclass(frozen=True)
class Mixture:
    """A product of the rows' results.

    Attributes:
        over: `keys` or `queries`: the summed dim.
        width: columns of the result.
        factor: number of the rows' operand for the factor that they compute.
        w: the other factor, `[keys or queries, width]`.
        c: the result, `[queries or keys, width]`.
    """

    over: str
    width: int
    factor: int
    w: View
    c: View


@dataclass(frozen=True)
class AttentionPlan:
    """The computation of one attention kernel; see the module's docstring.

    Attributes:
        name: symbol of the kernel.
        scores: the products before the rows.
        rows: the operation on them, a plan over `(batch..., queries | keys)`.  The operands for sums and
            factors are dense arrays over that space, which exist in the plan only.
        mixtures: the products after them.
        arrays: a number for each factor, `a0`, `b0`, `a1` ..., then `w0` ..., which those of one array share;
            none if they are not known.
    """

    name: str
    scores: tuple[Scores, ...]
    rows: KernelPlan
    mixtures: tuple[Mixture, ...]
    arrays: tuple[int, ...] = ()

    @property
    def batch(self) -> tuple[int, ...]:
        return self.rows.extents[:-2]

    @property
    def queries(self) -> int:
        return self.rows.extents[-2]

    @property
    def keys(self) -> int:
        return self.rows.extents[-1]

    @property
    def inner(self) -> frozenset[int]:
        """Operands of the rows that are not in memory."""
        return frozenset([s.sums for s in self.scores] + [m.factor for m in self.mixtures])

    @property
    def outer(self) -> tuple[int, ...]:
        return tuple(k for k in range(len(self.rows.operands)) if k not in self.inner)

    @property
    def views(self) -> dict[str, View]:
        """The factors `a0`, `b0` ... of the scores, and `w0` ... and the results `c0` ... of the mixtures."""
        score_views = {f"{side}{k}": getattr(s, side) for k, s in enumerate(self.scores) for side in "ab"}
        return score_views | {
            f"{side}{k}": getattr(m, side) for k, m in enumerate(self.mixtures) for side in "wc"
        }

    def array_of(self, name: str) -> int:
        """A number that the factors of one array share; each has one of its own if arrays are not known."""
        side, k = name[0], int(name[1:])
        place = 2 * len(self.scores) + k if side == "w" else 2 * k + (side == "b")
        return self.arrays[place] if self.arrays else place

    @property
    def flops(self) -> int:
        depth = sum(s.depth for s in self.scores) + sum(m.width for m in self.mixtures)
        return 2 * math.prod(self.rows.extents) * depth

    @cached_property
    def triangle(self) -> Triangle | None:
        """The part of the scores that need not be computed, if there is one."""
        return triangle_of(self.rows, frozenset(m.factor for m in self.mixtures))

    @property
    def share(self) -> float:
        return 1.0 if self.triangle is None else self.triangle.share(self.queries, self.keys)

    def text(self) -> str:
        """The plan in a readable form; equal plans have equal text."""
        lines = [f"attention {self.name} {'x'.join(map(str, self.rows.extents))}"]
        for score in self.scores:
            lines.append(f"  p{score.sums} = scores over {score.depth}: {_view(score.a)} · {_view(score.b)}")
        for mixture in self.mixtures:
            factors = f"p{mixture.factor} · {_view(mixture.w)}"
            lines.append(
                f"  {_view(mixture.c)} = mixture over {mixture.over}: {factors}, {mixture.width} wide"
            )
        if self.arrays:
            lines.append(f"  arrays {' '.join(map(str, self.arrays))}")
        if self.triangle is not None:
            lines.append(f"  {self.triangle}")
        return "\n".join(lines) + "\n" + self.rows.text()


def _view(view: View) -> str:
    return f"{view.dtype}+{view.offset} [{':'.join(map(str, (*view.batch, view.row, view.column)))}]"
