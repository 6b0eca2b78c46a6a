"""Prefetching of rows at places that the program computes.

A gather reads row after row, each somewhere else, which no hardware prefetcher foresees; but a row's place is
known long before the row is read.  While one row is copied, the lines of a later one are prefetched:

* into the first cache where the last cache holds the arrays;
* into the second cache beyond that, and once more at half the distance, since it drops prefetches while too
  many are in flight.

The distances are data of the CPU (`PrefetchDistances`).

This is the only prefetching that `benchmarks/ablation.py` found to be worth its code, beside that of matrix
products (`gemm/fetch.py`): see `docs/decisions/ablation.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.emit.nest import product, unflatten
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.plan import Apply, KernelPlan, Load, arguments
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.builder import Index as Position
from mpmd.compile.llvm.target import LINE_BYTES, CpuTarget
from mpmd.compile.llvm.types import Value

_MIN_FAR_ROWS, _MAX_FAR_ROWS = 4, 64
_MAX_OPERATIONS = 16  # that compute a place: they are done once more for each prefetch
_FIRST_CACHE, _SECOND_CACHE = 3, 2  # LLVM's localities


@dataclass(frozen=True)
class RowAccess:
    """Adjacent elements of an operand along the last dim."""

    operand: int
    index: Index


@dataclass(frozen=True)
class RowPrefetch:
    """What a kernel prefetches of later rows.

    Attributes:
        plan: the plan.
        accesses: the reads of each row.
        distances: how many rows ahead.
        locality: into which cache, as LLVM numbers them.
    """

    plan: KernelPlan
    accesses: tuple[RowAccess, ...]
    distances: tuple[int, ...]
    locality: int

    @staticmethod
    def of(plan: KernelPlan, target: CpuTarget) -> RowPrefetch | None:
        """For a plan of kind `loop`; None if no row's place is computed, or is worth a prefetch."""
        if plan.rank < 2 or not plan.size or product(plan.extents, range(plan.rank - 1)) < 2:
            return None
        found = tuple(a for a in _accesses(plan) if a.index.values())
        width = max((plan.extents[-1] * BYTES[plan.operands[a.operand].dtype] for a in found), default=0)
        if width < LINE_BYTES or _operations(plan, found) > _MAX_OPERATIONS:
            return None
        if sum(o.bytes for o in plan.operands) < target.l3_bytes:
            return RowPrefetch(plan, found, (-(-target.prefetch.near_bytes // width),), _FIRST_CACHE)
        rows = min(_MAX_FAR_ROWS, max(_MIN_FAR_ROWS, -(-target.prefetch.far_bytes // width)))
        return RowPrefetch(plan, found, (rows, rows // 2), _SECOND_CACHE)

    def rows(self, start: Scope, row: Position, end: Position) -> list[tuple[Value, int]]:
        """Addresses of the rows that are prefetched, and the size of their elements.

        Args:
            start: the function's scope.
            row: number of the current row.
            end: number after the last one.
        """
        f, plan, found = start.f, self.plan, list[tuple[Value, int]]()
        last = plan.rank - 1
        for distance in self.distances:
            later = f.imin(f.iadd(row, distance), f.isub(end, 1))
            scope = start.inside({**unflatten(f, later, range(last), plan.extents), last: 0})
            for access in self.accesses:
                size, pointer = BYTES[plan.operands[access.operand].dtype], start.pointers[access.operand]
                at = f.imul(scope.position(access.index), size)
                # a place may be outside of the array, where a guard keeps it from being read
                found.append((f.op(f"getelementptr i8, ptr {pointer}, i64 {at}", "ptr"), size))
        return found

    def emit(self, f: FunctionBuilder, rows: Sequence[tuple[Value, int]], parts: Sequence[Lanes]) -> None:
        """Prefetch the lines of later rows that correspond to some adjacent vectors of the current one."""
        if parts[0].count == 1:
            return
        count = len(parts) * parts[0].count
        for address, size in rows:
            at = f.imul(parts[0].start, size)
            for offset in range(0, count * size, LINE_BYTES):
                place = f.op(f"getelementptr i8, ptr {address}, i64 {f.iadd(at, offset)}", "ptr")
                f.prefetch(place, locality=self.locality)


def _accesses(plan: KernelPlan) -> list[RowAccess]:
    """Accesses with reads that are contiguous along the last dim, without duplicates."""
    last, found = plan.rank - 1, dict[RowAccess, None]()
    read = [(n.operand, n.index) for n in plan.nodes if isinstance(n, Load)]
    read += [(s.operand, s.index) for s in plan.stores if s.combine]
    for operand, index in read:
        varies = any(last in plan.depends[v] for v in index.values())
        if index.is_linear_in(last) and index.factor(last) == 1 and not varies:
            found[RowAccess(operand, index)] = None
    return list(found)


def _operations(plan: KernelPlan, accesses: Sequence[RowAccess]) -> int:
    """Operations that compute where some rows begin."""
    found, waiting = set[int](), [v for access in accesses for v in access.index.values()]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += arguments(plan.nodes[number])
    return sum(isinstance(plan.nodes[n], Apply) for n in found)
