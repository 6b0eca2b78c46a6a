"""Description of a matrix product: sizes, element types and strides, and the consumer of the result.

    C[..., m, n] = epilogue(sum over k of A[..., m, k] · B[..., k, n])

Any strides are allowed, so transposed and sliced operands, and heads inside a fused projection, need no
copies.  The products of a batch are units of one kernel, one after the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index
from mpmd.compile.llvm.llvm_types import Value
from mpmd.errors import CompileError

DTYPES = ("f32", "bf16", "f16", "f64")


@dataclass(frozen=True)
class Matrix:
    """A matrix, or one per batch index, in memory.

    Attributes:
        dtype: `f32`, `bf16`, `f16` or `f64`.
        row_stride, column_stride: distances in elements.
        batch_strides: distance in elements for each batch dim, outermost first.
    """

    dtype: str
    row_stride: int
    column_stride: int
    batch_strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gemm:
    """A batch of matrix products.

    Attributes:
        m, n, k: rows and columns of the result, and the length of the sums.
        a: `[m, k]`.
        b: `[k, n]`.
        c: `[m, n]`.
        batch: sizes of the batch dims, outermost first.
    """

    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    c: Matrix
    batch: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, matrix in (("a", self.a), ("b", self.b), ("c", self.c)):
            if matrix.dtype not in DTYPES:
                raise CompileError(
                    f"matrix product of {matrix.dtype}: operand {name} must be one of {', '.join(DTYPES)}"
                )
            if len(matrix.batch_strides) != len(self.batch):
                raise CompileError(
                    f"matrix product with {len(self.batch)} batch dims: "
                    f"operand {name} has {len(matrix.batch_strides)} batch strides"
                )
        wide = [m.dtype == "f64" for m in (self.a, self.b)]
        if any(wide) and not all(wide):
            raise CompileError(
                f"matrix product of {self.a.dtype} and {self.b.dtype}: convert one of them first"
            )

    @property
    def batch_size(self) -> int:
        return math.prod(self.batch)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch_size

    @property
    def accumulator(self) -> str:
        return "f64" if self.a.dtype == "f64" else "f32"


@dataclass(frozen=True)
class Position:
    """The position of a vector of sums in the result.

    Attributes:
        batch: one index per batch dim.
        row: its row.
        column: column of its first lane.
        mask: lanes that exist, or None if all do.
    """

    batch: tuple[Value | int, ...]
    row: Value
    column: Value
    mask: Value | None


class Epilogue(Protocol):
    """A consumer of finished sums, instead of storing them.

    Attributes:
        pointers: names of the pointer arguments that it reads or writes, C's among them if it is stored.
    """

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of the pointer arguments after A and B."""

    def vectors_at_once(self, target: CpuTarget) -> int:
        """How many vectors of sums are best given to `emit` together."""

    def emit(self, f: FunctionBuilder, parts: Sequence[tuple[Value, Position]]) -> None:
        """Emit code that consumes some vectors of sums; `f.arguments` has the pointers."""


@contextlib.contextmanager
def each_batch(
    f: FunctionBuilder, per_batch: int, batches: int
) -> Iterator[tuple[Index, tuple[Index, Index]]]:
    """Runs the block for each batch index of the units `[begin, end)`; yields it and its units.

    Args:
        f: a kernel under construction.
        per_batch: units of one product.
        batches: how many products; one needs no loop.
    """
    begin, end = f.arguments["begin"], f.arguments["end"]
    if batches == 1:
        yield 0, (begin, end)
        return
    last = f.idiv(f.iadd(end, per_batch - 1), per_batch)
    with f.loop(f.idiv(begin, per_batch), last) as batch:
        base = f.imul(batch.i, per_batch)
        yield batch.i, (f.imax(f.isub(begin, base), 0), f.imin(f.isub(end, base), per_batch))


def batch_offset(f: FunctionBuilder, gemm: Gemm, matrix: Matrix, batch: Index) -> Index:
    """Elements before a matrix of a batch index."""
    rest: Index = batch
    offset: Index = 0
    for size, stride in reversed(list(zip(gemm.batch, matrix.batch_strides))):
        offset = f.iadd(offset, f.imul(f.irem(rest, size), stride))
        rest = f.idiv(rest, size)
    return offset


def factor_addresses(f: FunctionBuilder, gemm: Gemm, batch: Index) -> tuple[Value, Value]:
    """Where A and B of a batch index begin."""
    before_a, before_b = (batch_offset(f, gemm, matrix, batch) for matrix in (gemm.a, gemm.b))
    a = f.offset(f.arguments["a"], f.imul(before_a, BYTES[gemm.a.dtype]))
    return a, f.offset(f.arguments["b"], f.imul(before_b, BYTES[gemm.b.dtype]))
