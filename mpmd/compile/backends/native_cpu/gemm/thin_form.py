"""Which products are thin, and how each is computed; see `thin.py`."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.gemm.problem import Gemm
from mpmd.compile.llvm.cpu import CpuTarget

_MAX_THIN = 8  # rows or columns
_MIN_DEPTH = 32  # sums for which adding up lanes is worthwhile
_SUMS_AT_ONCE = 8  # that keep a core busy
_STREAM = 512  # elements of a row for which reading it alone is worthwhile
_BLOCK = 16  # rows of the long factor whose sums are finished together


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
    """How a thin product is computed.

    Attributes:
        long, few: the factors.
        swapped: whether the long one is B, so that the result has few rows.
        group: rows of the long factor at once.
        block: its rows in a unit of work.
        pairs: whether two neighbours along K are one lane, as in micro-kernels.
        chains: running totals of each sum, so that no multiplication waits for the one before it.
    """

    long: Side
    few: Side
    swapped: bool
    group: int
    block: int
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
    if long.step != 1 or few.step != 1:
        return None
    pairs = gemm.a.dtype == gemm.b.dtype == "bf16" and target.bf16_dot
    group = min(_rows_at_once(few.items, gemm.k, pairs, target), long.items)
    chains = max(1, _SUMS_AT_ONCE // (few.items * group))
    return ThinForm(long, few, swapped, group, _BLOCK, pairs, chains)


def _rows_at_once(few: int, k: int, pairs: bool, target: CpuTarget) -> int:
    """Rows of the long factor for which dots load the few once."""
    if few == 1:
        return 1 if k >= _STREAM else 4  # one after the other they are read at the rate of memory
    return 4 if pairs and 2 < few <= 6 and target.vector_registers >= 32 else 2
