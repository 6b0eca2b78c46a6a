"""MatmulPlan: a batch of matrix products on strided arrays, with an epilogue.

    sums[b, m, n] = sum over k of a[b, m, k] · b[b, k, n]

Without an epilogue the sums are the result; with one they are an operand of a plan over `batch, m, n`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpmd.compile.kernels.kernel_plan import KernelPlan


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
