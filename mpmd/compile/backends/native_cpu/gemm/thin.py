"""Products with hardly any rows or columns.

A register tile has rows and whole vectors of columns, and such a product leaves most of it empty.  Its
factors are a long one and one of a few rows or columns:

    dots      the long factor is contiguous along K: vectors along K of some of its rows, times the same of
              each of the few; the lanes of each sum are added up at the end
    columns   it is contiguous along its rows: vectors of rows, times one number of each of the few, and so on
              for all of K

For dots the few are copied first unless they are contiguous along K too.  Sums go through a tile in the
workspace, so that whatever follows a product can follow these.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.gemm.batches import batch_offset, each_batch
from mpmd.compile.backends.native_cpu.gemm.finish import FinishTile
from mpmd.compile.backends.native_cpu.gemm.problem import Epilogue, Gemm
from mpmd.compile.backends.native_cpu.gemm.thin_form import ThinForm
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, load
from mpmd.compile.llvm.builder import FunctionBuilder, Index
from mpmd.compile.llvm.module import Module
from mpmd.compile.llvm.target import LINE_BYTES, CpuTarget
from mpmd.compile.llvm.types import Value, constant, lanes_of, vector


@dataclass(frozen=True)
class ThinKernel:
    """A thin product, ready to be emitted; a unit is a block of the long factor.

    Attributes:
        name: its symbol.
        gemm: what it computes.
        form: how.
        target: the CPU.
        epilogue: what becomes of the sums; None stores them.
    """

    name: str
    gemm: Gemm
    form: ThinForm
    target: CpuTarget
    epilogue: Epilogue | None = None

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of the pointer arguments before the workspace."""
        return ("a", "b", *(self.epilogue.pointers if self.epilogue else ("c",)))

    @property
    def units_per_batch(self) -> int:
        """Units of one product."""
        return -(-self.form.long.items // self.form.block)

    @property
    def units(self) -> int:
        """Units of all products."""
        return self.units_per_batch * self.gemm.batch_size

    @property
    def lanes(self) -> int:
        """Lanes of an accumulator."""
        return self.target.lanes("double" if self.gemm.accumulator == "f64" else "float")

    @property
    def width(self) -> int:
        """Columns of the tile that sums go through."""
        return self.form.block if self.form.swapped else -(-self.form.few.items // self.lanes) * self.lanes

    @property
    def step(self) -> int:
        """Elements of K in a vector of dots."""
        return 2 * self.lanes if self.form.pairs else self.lanes

    @property
    def copy_length(self) -> int:
        """Elements of a row of the copied few: whole vectors."""
        return -(-self.gemm.k // self.step) * self.step

    @property
    def spaces(self) -> tuple[int, int, int]:
        """Bytes of the workspace for the copied few, for the tile, and for sums that wait to be turned."""
        form, sums = self.form, BYTES[self.gemm.accumulator]
        element = 2 if form.pairs else sums
        copy = form.few.items * self.copy_length * element if form.copied else 0
        tile = (form.few.items if form.swapped else form.block) * self.width * sums
        turned = form.few.items * form.block * sums if form.kind == "columns" else 0
        whole = [-(-size // LINE_BYTES) * LINE_BYTES for size in (copy, tile, turned)]
        return whole[0], whole[1], whole[2]

    @property
    def workspace_bytes(self) -> int:
        """Size of a thread's workspace."""
        return sum(self.spaces)

    def emit(self, module: Module) -> list[SharedFunction]:
        """Add the kernel to a module; it calls no shared functions."""
        _Thin(self, module).emit()
        return []


class _Thin:
    """Emission of one kernel."""

    def __init__(self, kernel: ThinKernel, module: Module) -> None:
        self.kernel = kernel
        self.module = module
        self.gemm = kernel.gemm
        self.form = kernel.form
        self.lanes = kernel.lanes
        self.element = "double" if kernel.gemm.accumulator == "f64" else "float"
        self.vector = vector(self.element, kernel.lanes)
        self.sum_bytes = BYTES[kernel.gemm.accumulator]
        self.finish = FinishTile(kernel.name, kernel.gemm, kernel.width, kernel.epilogue)

    def emit(self) -> None:
        kernel = self.kernel
        if self.gemm.n % kernel.width:
            self.finish.emit(self.module, edge=True)
        if self.gemm.n >= kernel.width:
            self.finish.emit(self.module, edge=False)
        arguments = [(p, "ptr") for p in (*kernel.pointers, "workspace")]
        with FunctionBuilder(self.module, kernel.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            self.f = f
            copy, tile, _ = kernel.spaces
            workspace = f.arguments["workspace"]
            self.copy, self.tile = workspace, f.offset(workspace, copy)
            self.turned = f.offset(workspace, copy + tile)
            with each_batch(f, kernel.units_per_batch, self.gemm.batch_size) as (batch, units):
                self._product(batch, units)

    def _product(self, batch: Index, units: tuple[Index, Index]) -> None:
        f, form, gemm = self.f, self.form, self.gemm
        bases = {}
        for name, matrix in (("a", gemm.a), ("b", gemm.b)):
            offset = f.imul(batch_offset(f, gemm, matrix, batch), BYTES[matrix.dtype])
            bases[name] = f.offset(f.arguments[name], offset)
        long, few = bases[form.long.name], bases[form.few.name]
        if form.copied:
            self._copy(few)
        with f.loop(units[0], units[1]) as unit:
            start = f.index(f.imul(unit.i, form.block))
            if form.kind == "dots":
                self._dots(batch, long, self.copy if form.copied else few, start)
            else:
                self._columns(batch, long, few, start)

    def _finish(self, batch: Index, tile: Value, rows: Index, row: Index, column: Index) -> None:
        """Call what follows on some rows of the tile, at a place of the result."""
        f, gemm, width = self.f, self.gemm, self.kernel.width
        pointers = [f.arguments[p] for p in self.kernel.pointers[2:]]
        given = [tile, f.index(rows), f.index(row), f.index(column), f.index(batch), *pointers]
        if gemm.n % width == 0 or gemm.n < width:
            f.call(self.finish.name(edge=gemm.n < width), *given)
            return
        whole = f.compare("sle", f.index(column), constant(gemm.n - width, "i64"))
        with f.when(whole):
            f.call(self.finish.name(edge=False), *given)
        with f.when(f.not_(whole)):
            f.call(self.finish.name(edge=True), *given)

    # -- dots ------------------------------------------------------------------------------------------------
    def _copy(self, few: Value) -> None:
        """The few, K adjacent, with zeros up to a whole vector."""
        f, form, length = self.f, self.form, self.kernel.copy_length
        stored = "i16" if form.pairs else self.element
        with f.loop(0, self.gemm.k) as k:
            for n in range(form.few.items):
                at = f.iadd(f.imul(k.i, form.few.step), n * form.few.item)
                if form.pairs:
                    value = f.load(few, "i16", at)
                else:
                    value = load(f, few, form.few.dtype, 1, at)
                f.store(value, self.copy, f.iadd(k.i, n * length))
        with f.loop(self.gemm.k, length) as k:
            for n in range(form.few.items):
                f.store(constant(0, stored), self.copy, f.iadd(k.i, n * length))

    def _dots(self, batch: Index, long: Value, few: Value, start: Value) -> None:
        f, form, width = self.f, self.form, self.kernel.width
        count = f.imin(form.block, f.isub(form.long.items, start))
        with f.loop(0, count, form.group) as part:
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
            self._finish(batch, self.tile, self.gemm.m, 0, start)
        else:
            self._finish(batch, self.tile, count, start, 0)

    def _sums(self, rows: list[Value], few: Value) -> list[list[Value]]:
        """For each of the few and each row a vector whose lanes add up to their product."""
        f, step, k, chains = self.f, self.kernel.step, self.gemm.k, self.form.chains
        items, many, whole = self.form.few.items, k // (step * chains) * step * chains, k // step * step
        count = items * len(rows)
        start = [constant(0.0, self.vector)] * (count * chains)
        with f.loop(0, many, step * chains, carried=start) as loop:
            following: list[Value] = []
            for chain in range(chains):
                sums = loop.carried[chain * count : (chain + 1) * count]
                following += self._multiply(rows, few, f.iadd(loop.i, chain * step), None, sums)
            loop.carry(following)
        found = loop.carried[:count]
        for chain in range(1, chains):
            found = [f.add(x, y) for x, y in zip(found, loop.carried[chain * count :])]
        for at in range(many, whole, step):
            found = self._multiply(rows, few, at, None, found)
        if whole < k:
            numbers = f.lane_numbers(step, "i64")
            mask = f.compare("slt", numbers, f.splat(constant(k - whole, "i64"), step))
            found = self._multiply(rows, few, whole, mask, found)
        return [found[n * len(rows) : (n + 1) * len(rows)] for n in range(items)]

    def _multiply(
        self, rows: list[Value], few: Value, k: Index, mask: Value | None, sums: list[Value]
    ) -> list[Value]:
        form, count = self.form, len(rows)
        following = list(sums)
        factors = [self._load(row, form.long.dtype, k, mask) for row in rows]
        for n in range(form.few.items):
            if form.copied:
                at = self.f.iadd(k, n * self.kernel.copy_length)
                other = self._load(few, self.gemm.accumulator if not form.pairs else "bf16", at, None)
            else:
                other = self._load(few, form.few.dtype, self.f.iadd(k, n * form.few.item), mask)
            for r, factor in enumerate(factors):
                following[n * count + r] = self._multiply_add(factor, other, sums[n * count + r])
        return following

    def _load(self, pointer: Value, dtype: str, at: Index, mask: Value | None) -> Value:
        """A vector along K."""
        f = self.f
        if not self.form.pairs:
            return load(f, pointer, dtype, self.lanes, at, mask)
        type_ = vector("i16", 2 * self.lanes)
        return f.load(pointer, type_, at) if mask is None else f.masked_load(pointer, type_, mask, at)

    def _multiply_add(self, a: Value, b: Value, sums: Value) -> Value:
        f = self.f
        if not self.form.pairs:
            return f.fma(a, b, sums)
        pairs = vector("bfloat", 2 * self.lanes)
        a, b = f.cast("bitcast", a, pairs), f.cast("bitcast", b, pairs)
        return f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", self.vector, sums, a, b)

    def _folded(self, vectors: list[Value]) -> Value:
        """The sum of the lanes of each of some vectors, at most as many as each has lanes, in one vector."""
        f, wanted = self.f, len(vectors)
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

    # -- columns ---------------------------------------------------------------------------------------------
    def _columns(self, batch: Index, long: Value, few: Value, start: Value) -> None:
        """All of K for some vectors of rows; the last block begins so early that it is whole."""
        f, form, width = self.f, self.form, self.kernel.width
        first = f.imin(start, form.long.items - form.block)
        items = form.few.items
        zero = constant(0.0, self.vector)
        element, distance = MEMORY[form.long.dtype], form.long.step * BYTES[form.long.dtype]
        with f.loop(0, self.gemm.k, carried=[zero] * (items * form.group)) as k:
            at = f.offset(long, f.iadd(f.imul(k.i, form.long.step), first), element)
            for line in range(0, form.block * BYTES[form.long.dtype], LINE_BYTES):
                f.prefetch(f.offset(at, f.target.prefetch.column_steps * distance + line))
            vectors = [load(f, at, form.long.dtype, self.lanes, v * self.lanes) for v in range(form.group)]
            following = []
            for n in range(items):
                place = f.iadd(f.imul(k.i, form.few.step), n * form.few.item)
                number = f.splat(load(f, few, form.few.dtype, 1, place), self.lanes)
                for v, value in enumerate(vectors):
                    following.append(f.fma(value, number, k.carried[n * form.group + v]))
            k.carry(following)
        for place, value in enumerate(k.carried):
            f.store(value, self.turned, place * self.lanes)
        with f.loop(0, form.block) as row:
            for n in range(items):
                value = f.load(self.turned, self.element, f.iadd(row.i, n * form.block))
                f.store(value, self.tile, f.iadd(f.imul(row.i, width), n))
        done = f.isub(start, first)
        tile = f.offset(self.tile, f.imul(done, width * self.sum_bytes))
        self._finish(batch, tile, f.isub(form.block, done), start, 0)
