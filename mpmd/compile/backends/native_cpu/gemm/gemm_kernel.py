"""The kernel of one matrix product: cache blocking around shared micro-kernels, epilogue at the end.

    void name(ptr a, ptr b, ptr result..., ptr workspace, i64 begin, i64 end)

does units `[begin, end)` of the product.  A unit is a strip of columns, or of rows, of one batch index;
threads take disjoint ranges and a workspace each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.gemm.finish import ProductKernel
from mpmd.compile.backends.native_cpu.gemm.micro_kernel import MicroKernel, Rows
from mpmd.compile.backends.native_cpu.gemm.operands import Block, Operands
from mpmd.compile.backends.native_cpu.gemm.problem import (
    Epilogue,
    Gemm,
    batch_offset,
    each_batch,
    factor_addresses,
)
from mpmd.compile.backends.native_cpu.gemm.thin import ThinKernel, thin_form
from mpmd.compile.backends.native_cpu.gemm.tiling import Tiling, choose_tiling
from mpmd.compile.backends.native_cpu.shared import SharedFunction, kernel_function
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.llvm.cpu import LINE_BYTES, CpuTarget
from mpmd.compile.llvm.function_builder import Index, Module
from mpmd.compile.llvm.llvm_types import Value, constant


@dataclass(frozen=True)
class GemmKernel(ProductKernel):
    """A matrix product in register tiles.

    Attributes:
        tiling: its loop nest.
    """

    tiling: Tiling

    @property
    def width(self) -> int:
        return self.tiling.width

    @property
    def units_per_batch(self) -> int:
        """Units of one product."""
        t = self.tiling
        if self.gemm.m == 0 or self.gemm.n == 0:
            return 0
        if t.split == "rows":
            return -(-self.gemm.m // t.rows)
        return -(-self.gemm.n // t.width) * self.parts

    @property
    def parts(self) -> int:
        """Parts into which the rows of a strip of columns are divided."""
        part_rows = self.tiling.part_rows
        return -(-self.gemm.m // part_rows) if part_rows else 1

    @property
    def workspace_bytes(self) -> int:
        """Size of a thread's workspace."""
        return self.workspace.size

    @property
    def workspace(self) -> Workspace:
        """What one thread's workspace holds."""
        return Workspace.of(self)

    def emit(self, module: Module) -> list[SharedFunction]:
        """Add the kernel to a module; returns the shared functions that it calls."""
        return _Driver(self, module).emit()


def gemm_kernel(
    name: str, gemm: Gemm, target: CpuTarget, epilogue: Epilogue | None = None
) -> GemmKernel | ThinKernel:
    """A kernel with the tiling that suits the target by rule, or one without tiles."""
    form = thin_form(gemm, target)
    if form is not None:
        return ThinKernel(name, gemm, form, target, epilogue=epilogue)
    return GemmKernel(name, gemm, choose_tiling(gemm, target), epilogue=epilogue)


@dataclass(frozen=True)
class Workspace:
    """Byte offsets inside of a thread's workspace.

    Attributes:
        a, b: packed operands.
        tile: one register tile, for tiles that cannot be stored as they are.
        rest: sums between two chunks of K, when C itself cannot hold them.
        rest_width: columns of `rest`.
        size: bytes in all.
    """

    a: int
    b: int
    tile: int
    rest: int
    rest_width: int
    size: int

    @staticmethod
    def of(kernel: GemmKernel) -> Workspace:
        t, gemm = kernel.tiling, kernel.gemm
        element = 2 if t.step == "bf16x2" else BYTES[t.step]
        sums = BYTES[gemm.accumulator]
        chunks = max(1, -(-gemm.k // t.kc))
        sizes = [
            t.mc * t.kc * element if t.pack_a else 0,
            (t.panels if t.pack_b else 1) * t.width * t.kc * element,
            t.rows * t.width * sums,
        ]
        # Where sums wait for the next chunk of K: in C if it can hold them, else in `rest`, for all strips
        # of a group. The strip at the edge always waits there: C has no columns for its padding.
        direct = stores_directly(kernel)
        rest_width = 0
        if chunks > 1 and (not direct or gemm.n % t.width):
            rest_width = t.width if direct else t.panels * t.width
        sizes.append(gemm.m * rest_width * sums)
        offsets: list[int] = []
        end = 0
        for size in sizes:
            offsets.append(end)
            # Parts that are not used have no bytes; others begin at a line.
            # packing writes whole registers: one beyond the end at most
            end += -(-(size + LINE_BYTES if size else 0) // LINE_BYTES) * LINE_BYTES
        a, b, tile, rest = offsets
        return Workspace(a, b, tile, rest, rest_width, end)


def stores_directly(kernel: GemmKernel) -> bool:
    """Whether C holds the sums of a full tile, those between two chunks of K too."""
    c = kernel.gemm.c
    return kernel.epilogue is None and c.dtype == kernel.gemm.accumulator and c.column_stride == 1


_Place = tuple[Value, Index, int]
"""A tile in memory: its address, bytes between its rows, bytes between the lines of a row (0: it has one)."""


class _Driver:
    def __init__(self, kernel: GemmKernel, module: Module) -> None:
        self.kernel = kernel
        self.module = module
        self.gemm = kernel.gemm
        self.tiling = kernel.tiling
        self.space = kernel.workspace
        self.direct = stores_directly(kernel)
        self.chunks = max(1, -(-self.gemm.k // self.tiling.kc))
        self.sum_bytes = BYTES[self.gemm.accumulator]
        self.shared: dict[str, SharedFunction] = {}
        self.finish = kernel.finish

    def emit(self) -> list[SharedFunction]:
        kernel, t = self.kernel, self.tiling
        if self.gemm.n % t.width:
            self.finish.emit(self.module, edge=True)
        if not self.direct and self.gemm.n >= t.width:
            self.finish.emit(self.module, edge=False)
        with kernel_function(self.module, kernel, plain=True) as f:
            self.f = f
            places = self.space.a, self.space.b
            self.operands = Operands(f, self.gemm, t, places, self.shared)
            if kernel.units_per_batch:
                with each_batch(f, kernel.units_per_batch, self.gemm.batch_size) as (batch, units):
                    self._product(batch, units)
        return [self.shared[name] for name in sorted(self.shared)]

    # -- loops -------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _each(self, lo: Index, hi: Index, step: int) -> Iterator[Index]:
        """A loop; none around what runs once."""
        if isinstance(lo, int) and isinstance(hi, int) and lo < hi <= lo + step:
            yield lo
            return
        with self.f.loop(lo, hi, step) as loop:
            yield loop.i

    def _product(self, batch: Index, units: tuple[Index, Index]) -> None:
        f, t, gemm, parts = self.f, self.tiling, self.gemm, self.kernel.parts
        if t.split == "rows":
            rows = (f.imul(units[0], t.rows), f.imin(f.imul(units[1], t.rows), gemm.m))
            self._rectangle(batch, rows, (0, -(-gemm.n // t.width)))
            return
        if parts == 1:
            self._rectangle(batch, (0, gemm.m), units)
            return
        # part after part of each strip: at most the end of one strip, whole strips, and the start of another
        at, stop = f.stack("i64"), f.index(units[1])
        f.store(f.index(units[0]), at)
        with f.repeat() as leave_if:
            unit = f.load(at, "i64")
            leave_if(f.compare("sge", unit, stop))
            strip, part, left = f.idiv(unit, parts), f.irem(unit, parts), f.isub(stop, unit)
            whole = f.and_(
                f.compare("eq", f.index(part), constant(0, "i64")),
                f.compare("sge", f.index(left), constant(parts, "i64")),
            )
            strips = f.select(whole, f.index(f.idiv(left, parts)), constant(1, "i64"))
            last = f.select(whole, constant(parts, "i64"), f.index(f.imin(f.iadd(part, left), parts)))
            rows = (f.imul(part, t.part_rows), f.imin(f.imul(last, t.part_rows), gemm.m))
            self._rectangle(batch, rows, (strip, f.iadd(strip, strips)))
            done = f.select(whole, f.index(f.imul(strips, parts)), f.index(f.isub(last, part)))
            f.store(f.index(f.iadd(unit, done)), at)

    def _rectangle(self, batch: Index, rows: tuple[Index, Index], panels: tuple[Index, Index]) -> None:
        f, t, gemm = self.f, self.tiling, self.gemm
        a, b = factor_addresses(f, gemm, batch)
        following = None
        if not isinstance(batch, int):
            # Addresses of the next product are computed even if it does not exist: nothing is read or
            # fetched there then.
            after = f.iadd(batch, 1)
            exists = f.compare("slt", f.index(after), constant(gemm.batch_size, "i64"))
            following = (*factor_addresses(f, gemm, after), exists)
        c = a  # an epilogue has pointers of its own
        if self.kernel.epilogue is None:
            before = f.imul(batch_offset(f, gemm, gemm.c, batch), BYTES[gemm.c.dtype])
            c = f.offset(f.arguments["c"], before)
        with self._each(panels[0], panels[1], t.panels) as group:
            group_end = f.imin(f.iadd(group, t.panels), panels[1])
            # With K = 0 one chunk of depth 0 stores zeros.
            with self._each(0, max(1, gemm.k), t.kc) as chunk:
                depth = f.imin(f.isub(gemm.k, chunk), t.kc)
                if isinstance(chunk, int):
                    later, is_last = constant(0, "i64"), constant(1, "i1")
                else:
                    later = f.cast("zext", f.compare("ne", chunk, constant(0, "i64")), "i64")
                    is_last = f.compare("sge", chunk, constant(gemm.k - t.kc, "i64"))
                strips = group, group_end
                block = Block(
                    a=a,
                    b=b,
                    c=c,
                    batch=batch,
                    k=chunk,
                    depth=depth,
                    later=later,
                    last=is_last,
                    rows=rows,
                    panels=strips,
                    end=panels[1],
                    following=following,
                )
                with self._each(rows[0], rows[1], t.mc) as start:
                    self._row_block(block, start, f.imin(f.iadd(start, t.mc), rows[1]))

    def _row_block(self, block: Block, start: Index, end: Index) -> None:
        f, t, gemm = self.f, self.tiling, self.gemm
        self.operands.begin_rows(block, start, end)
        whole_panels = gemm.n // t.width
        whole_rows = f.imin(end, gemm.m // t.rows * t.rows)

        def tiles(panel: Index, edge: bool) -> None:
            if gemm.m >= t.rows:
                with self._each(start, whole_rows, t.rows) as tile:
                    self._tile(block, start, tile, t.rows, panel, edge)
            if gemm.m % t.rows:
                with self._each(whole_rows, end, t.rows) as tile:
                    self._tile(block, start, tile, gemm.m % t.rows, panel, edge)

        if whole_panels:
            with self._each(block.panels[0], f.imin(block.panels[1], whole_panels), 1) as panel:
                self.operands.begin_strip(block, start, end, panel, packed=t.pack_b)
                tiles(panel, False)
        if gemm.n % t.width:
            with self._each(f.imax(block.panels[0], whole_panels), block.panels[1], 1) as panel:
                self.operands.begin_strip(block, start, end, panel, packed=True)
                tiles(panel, True)

    def _workspace(self, offset: int) -> Value:
        return self.f.offset(self.f.arguments["workspace"], offset)

    # -- one tile ----------------------------------------------------------------------------------------
    def _tile(self, block: Block, start: Index, row: Index, rows: int, panel: Index, edge: bool) -> None:
        f, t, operands = self.f, self.tiling, self.operands
        a_adjacent, a, a_stride = operands.tile(block, start, row)
        b, b_stride = operands.strip(block, panel, packed=t.pack_b or edge)
        micro = MicroKernel(t.step, rows, t.vectors, a_adjacent)
        self.shared[micro.name] = micro
        factors = (a, a_stride), (b, b_stride), operands.fetch(row, panel), operands.steps(block.depth)

        # Sums of a full tile go to C, where they also wait for the next chunk. Others go through the
        # workspace's tile: in one chunk at once, else chunk by chunk through `rest`, and the last into the
        # tile. `near` is the memory that is read or written after the sums, fetched meanwhile.
        c = self._place_of_result(block, row, panel)
        if self.direct and not edge:
            micro.call(f, *factors, c[:2], c[:2], c, block.later)
            return
        tile: Rows = self._workspace(self.space.tile), t.width * self.sum_bytes
        if self.chunks == 1:
            micro.call(f, *factors, tile, tile, c)
        else:
            column = 0 if self.direct else f.imul(f.isub(panel, block.panels[0]), t.width)
            at = f.iadd(f.imul(row, self.space.rest_width), column)
            rest = f.offset(self._workspace(self.space.rest), f.imul(at, self.sum_bytes))
            so_far = rest, self.space.rest_width * self.sum_bytes
            d = f.select(block.last, tile[0], rest)
            stride = f.select(block.last, f.index(tile[1]), f.index(so_far[1]))
            near = *so_far, self._next_line(self.sum_bytes)
            micro.call(f, *factors, so_far, (d, stride), near, block.later)
        column = f.index(f.imul(panel, t.width))
        # only the last chunk has the whole sums, which an epilogue needs
        with f.when(block.last):
            results = [f.arguments[p] for p in self.kernel.pointers[2:]]
            self.finish.call(f, tile[0], rows, row, column, block.batch, results, edge=edge)

    def _place_of_result(self, block: Block, row: Index, panel: Index) -> _Place:
        f, c, size = self.f, self.gemm.c, BYTES[self.gemm.c.dtype]
        if self.kernel.epilogue is not None or c.column_stride != 1:
            return self._workspace(self.space.tile), self.tiling.width * self.sum_bytes, 0
        at = f.iadd(f.imul(row, c.row_stride), f.imul(panel, self.tiling.width))
        return f.offset(block.c, f.imul(at, size)), c.row_stride * size, self._next_line(size)

    def _next_line(self, size: int) -> int:
        return LINE_BYTES if self.tiling.width * size > LINE_BYTES else 0
