"""Products of one kernel, one after the other: units to batch indices, and offsets of the factors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index


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
