"""Which products are thin, and the algorithm of each; see `thin.py`."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.gemm.problem import Gemm
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.llvm.target import CpuTarget

_MAX_THIN = 8  # rows or columns
_MIN_DEPTH = 32  # sums for which adding up lanes is worthwhile
_SUMS_AT_ONCE = 8  # that keep a core busy
_STREAM = 512  # elements of a row for which reading it alone is worthwhile
_BLOCK = 16  # rows of the long factor whose sums are finished together
_MAX_VECTORS = 8
_COPY_BYTES = 1 << 18  # of the few: more would not stay in the cache


@dataclass(frozen=True)
class Side:
    """A factor, seen from K.

    Attributes:
        name: of its pointer.
        dtype: of its elements.
        items: its rows or columns.
        item: distance from one of them to the next, in elements.
        step: distance along K.
    """

    name: str
    dtype: str
    items: int
    item: int
    step: int


@dataclass(frozen=True)
class ThinForm:
    """The algorithm of a thin product.

    Attributes:
        kind: `dots` or `columns`.
        long, few: the factors.
        swapped: whether the long one is B, so that the result has few rows.
        group: of the long factor, rows at once (`dots`) or vectors at once (`columns`).
        block: its rows in a unit of work.
        copied: whether the few are copied.
        pairs: whether two neighbours along K are one lane, as in micro-kernels.
        chains: running totals of each sum, so that no multiplication waits for the one before it.
    """

    kind: str
    long: Side
    few: Side
    swapped: bool
    group: int
    block: int
    copied: bool = False
    pairs: bool = False
    chains: int = 1


def thin_form(gemm: Gemm, target: CpuTarget) -> ThinForm | None:
    """The thin form of a product; None where tiles are better."""
    if not 0 < min(gemm.m, gemm.n) <= _MAX_THIN or gemm.k < _MIN_DEPTH:
        return None
    a = Side("a", gemm.a.dtype, gemm.m, gemm.a.row_stride, gemm.a.column_stride)
    b = Side("b", gemm.b.dtype, gemm.n, gemm.b.column_stride, gemm.b.row_stride)
    swapped = gemm.n > gemm.m
    long, few = (b, a) if swapped else (a, b)
    lanes = target.lanes("double" if gemm.accumulator == "f64" else "float")
    if long.step == 1:
        pairs = gemm.a.dtype == gemm.b.dtype == "bf16" and target.bf16_dot
        copied = few.step != 1
        if copied and gemm.k * few.items * BYTES[gemm.accumulator] > _COPY_BYTES:
            return None
        group = min(_rows_at_once(few.items, gemm.k, pairs, target), long.items)
        chains = max(1, _SUMS_AT_ONCE // (few.items * group))
        return ThinForm("dots", long, few, swapped, group, _BLOCK, copied, pairs, chains)
    if long.item == 1 and not swapped and few.items > 1 and long.items >= lanes:
        most = min(_MAX_VECTORS, (target.vector_registers - 1) // (few.items + 1), long.items // lanes)
        units = -(-long.items // (most * lanes))
        vectors = -(-long.items // (units * lanes))
        vectors = min(vectors, long.items // lanes)
        return ThinForm("columns", long, few, swapped, vectors, vectors * lanes)
    return None


def _rows_at_once(few: int, k: int, pairs: bool, target: CpuTarget) -> int:
    """Rows of the long factor for which dots load the few once."""
    if few == 1:
        return 1 if k >= _STREAM else 4  # one after the other they are read at the rate of memory
    return 4 if pairs and 2 < few <= 6 and target.vector_registers >= 32 else 2
