"""Products with hardly any rows or columns.

A register tile has rows and whole vectors of columns, and such a product leaves most of it empty.  Here
its factors, a long one and one of a few rows or columns, are contiguous along K: vectors along K of some rows
of the long one are multiplied by the same of each of the few, and the lanes of each sum are added up at the
end.  Sums go through a tile in the workspace, so that whatever follows a product can follow these.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.gemm.finish import ProductKernel
from mpmd.compile.backends.native_cpu.gemm.micro_kernel import multiply_add
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, each_batch, factor_addresses
from mpmd.compile.backends.native_cpu.shared import SharedFunction, kernel_function
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, load
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import Index, Module
from mpmd.compile.llvm.llvm_types import Value, constant, lanes_of, vector

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


@dataclass(frozen=True)
class ThinKernel(ProductKernel):
    """A thin product; a unit is a block of the long factor.

    Attributes:
        form: which factor is long, and how many of its rows are done together.
        target: the CPU.
    """

    form: ThinForm
    target: CpuTarget

    @property
    def units_per_batch(self) -> int:
        """Units of one product."""
        return -(-self.form.long.items // self.form.block)

    @property
    def lanes(self) -> int:
        return self.target.lanes("double" if self.gemm.accumulator == "f64" else "float")

    @property
    def width(self) -> int:
        return self.form.block if self.form.swapped else -(-self.form.few.items // self.lanes) * self.lanes

    @property
    def step(self) -> int:
        return 2 * self.lanes if self.form.pairs else self.lanes

    @property
    def workspace_bytes(self) -> int:
        """Size of a thread's workspace, which is the tile."""
        rows = self.form.few.items if self.form.swapped else self.form.block
        return rows * self.width * BYTES[self.gemm.accumulator]

    def emit(self, module: Module) -> list[SharedFunction]:
        """Add the kernel to a module; it calls no shared functions."""
        _Thin(self, module).emit()
        return []


class _Thin:
    def __init__(self, kernel: ThinKernel, module: Module) -> None:
        self.kernel = kernel
        self.module = module
        self.gemm = kernel.gemm
        self.form = kernel.form
        self.lanes = kernel.lanes
        self.element = "double" if kernel.gemm.accumulator == "f64" else "float"
        self.vector = vector(self.element, kernel.lanes)
        self.sum_bytes = BYTES[kernel.gemm.accumulator]
        self.finish = kernel.finish

    def emit(self) -> None:
        kernel = self.kernel
        if self.gemm.n % kernel.width:
            self.finish.emit(self.module, edge=True)
        if self.gemm.n >= kernel.width:
            self.finish.emit(self.module, edge=False)
        with kernel_function(self.module, kernel) as f:
            self.f = f
            self.tile = f.arguments["workspace"]
            with each_batch(f, kernel.units_per_batch, self.gemm.batch_size) as (batch, units):
                self._product(batch, units)

    def _product(self, batch: Index, units: tuple[Index, Index]) -> None:
        f, form = self.f, self.form
        a, b = factor_addresses(f, self.gemm, batch)
        long, few = (b, a) if form.swapped else (a, b)
        with f.loop(units[0], units[1]) as unit:
            self._dots(batch, long, few, f.index(f.imul(unit.i, form.block)))

    def _finish(self, batch: Index, rows: Index, row: Index, column: Index) -> None:
        f, n, width = self.f, self.gemm.n, self.kernel.width
        row, column = f.index(row), f.index(column)
        results = [f.arguments[p] for p in self.kernel.pointers[2:]]

        def call(edge: bool) -> None:
            self.finish.call(f, self.tile, rows, row, column, batch, results, edge=edge)

        # whether a column begins a whole tile is known while compiling, unless there are tiles of both
        # kinds
        if n % width == 0 or n < width:
            call(n < width)
            return
        whole = f.compare("sle", column, constant(n - width, "i64"))
        with f.when(whole):
            call(False)
        with f.when(f.not_(whole)):
            call(True)

    def _dots(self, batch: Index, long: Value, few: Value, start: Value) -> None:
        f, form, width = self.f, self.form, self.kernel.width
        count = f.imin(form.block, f.isub(form.long.items, start))
        with f.loop(0, count, form.group) as part:
            # A group that goes beyond the last row reads that again: its sums land in rows of the tile that
            # are not finished.
            first = f.iadd(start, part.i)
            rows = [
                f.offset(
                    long,
                    f.imul(f.imin(f.iadd(first, r), form.long.items - 1), form.long.item),
                    MEMORY[form.long.dtype],
                )
                for r in range(form.group)
            ]
            sums = self._sums(rows, few)  # [few][group]
            if not form.swapped:
                sums = [list(row) for row in zip(*sums)]
            for number, row in enumerate(sums):
                place = (
                    f.iadd(number * width, part.i) if form.swapped else f.imul(f.iadd(part.i, number), width)
                )
                for at in range(0, len(row), self.lanes):
                    f.store(self._folded(row[at : at + self.lanes]), self.tile, f.iadd(place, at))
        if form.swapped:
            self._finish(batch, self.gemm.m, 0, start)
        else:
            self._finish(batch, count, start, 0)

    def _sums(self, rows: list[Value], few: Value) -> list[list[Value]]:
        """For each of the few and each row a vector whose lanes add up to their product."""
        f, step, k, chains = self.f, self.kernel.step, self.gemm.k, self.form.chains
        items, many, whole = self.form.few.items, k // (step * chains) * step * chains, k // step * step
        count = items * len(rows)
        start = [constant(0.0, self.vector)] * (count * chains)
        with f.loop(0, many, step * chains, carried=start) as loop:
            # Chains are independent sums over every `chains`-th step: an FMA takes several cycles, and one
            # chain would wait for each.
            following: list[Value] = []
            for chain in range(chains):
                sums = loop.carried[chain * count : (chain + 1) * count]
                following += self._multiply(rows, few, f.iadd(loop.i, chain * step), None, sums)
            loop.carry(following)
        totals = loop.carried[:count]
        for chain in range(1, chains):
            totals = [f.add(x, y) for x, y in zip(totals, loop.carried[chain * count :])]
        # the chains are one by now: fewer steps are left than they take
        for at in range(many, whole, step):
            totals = self._multiply(rows, few, at, None, totals)
        if whole < k:
            numbers = f.lane_numbers(step, "i64")
            mask = f.compare("slt", numbers, f.splat(constant(k - whole, "i64"), step))
            totals = self._multiply(rows, few, whole, mask, totals)
        return [totals[n * len(rows) : (n + 1) * len(rows)] for n in range(items)]

    def _multiply(
        self, rows: list[Value], few: Value, k: Index, mask: Value | None, sums: list[Value]
    ) -> list[Value]:
        form, count = self.form, len(rows)
        following = list(sums)
        factors = [self._load(row, form.long.dtype, k, mask) for row in rows]
        for n in range(form.few.items):
            other = self._load(few, form.few.dtype, self.f.iadd(k, n * form.few.item), mask)
            for r, factor in enumerate(factors):
                total = sums[n * count + r]
                following[n * count + r] = multiply_add(self.f, factor, other, total, pairs=form.pairs)
        return following

    def _load(self, pointer: Value, dtype: str, at: Index, mask: Value | None) -> Value:
        f = self.f
        if not self.form.pairs:
            return load(f, pointer, dtype, self.lanes, at, mask)
        type_ = vector("i16", 2 * self.lanes)
        return f.load(pointer, type_, at) if mask is None else f.masked_load(pointer, type_, mask, at)

    def _folded(self, vectors: list[Value]) -> Value:
        """The sum of the lanes of each of some vectors, at most as many as each has lanes, in one vector."""
        f, wanted = self.f, len(vectors)
        # Vectors are folded in pairs: the halves of both are added, and their sums are side by side in one
        # vector, so that n vectors take about n additions instead of n·log(lanes). Copies fill up the
        # number of vectors to a power of two.
        size = 1 << (wanted - 1).bit_length()
        rows = vectors + [vectors[-1]] * (size - wanted)
        pieces = 1  # sums that a vector holds parts of
        while len(rows) > 1:
            rows = [self._fold(rows[k], rows[k + 1], pieces) for k in range(0, len(rows), 2)]
            pieces *= 2
        (sums,) = rows
        while lanes_of(sums.type) > size:
            sums = self._fold(sums, None, pieces)
        if wanted == size:
            return sums if size > 1 else f.extract(sums, 0)
        return f.shuffle(sums, sums, range(wanted))

    def _fold(self, a: Value, b: Value | None, pieces: int) -> Value:
        """Halves of every piece of one vector, or of two, added."""
        lanes = lanes_of(a.type)
        piece = lanes // pieces
        starts = [p * piece for p in range(pieces)]
        starts += [lanes + s for s in starts] if b is not None else []
        halves = [[s + half + lane for s in starts for lane in range(piece // 2)] for half in (0, piece // 2)]
        other = a if b is None else b
        low, high = (self._picked(a, other, order) for order in halves)
        return self.f.add(low, high)

    def _picked(self, a: Value, b: Value, order: list[int]) -> Value:
        return self.f.extract(a, order[0]) if len(order) == 1 else self.f.shuffle(a, b, order)
