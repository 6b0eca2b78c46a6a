"""A and B on their way to micro-kernels: copies in the order in which they are read, and early fetches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.gemm.micro_kernel import Fetch
from mpmd.compile.backends.native_cpu.gemm.packing import Pack
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.gemm.tiling import Tiling, adjacency
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.llvm.cpu import LINE_BYTES
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index
from mpmd.compile.llvm.llvm_types import Value, constant

_FETCHES = 4  # one tile in four prefetches the next block of A, three prefetch B: there is more time for A


@dataclass
class Block:
    """Values fixed by the loops around a tile.

    Attributes:
        a, b, c: the matrices of a batch index.
        batch: the batch index.
        k, depth: where the chunk of K begins, and its length.
        later: i64, 1 unless this is the first chunk of K: sums are added to those before.
        last: i1, whether it is the last one.
        rows, panels: rows and strips that are done, from and to.
        end: the strip before which this batch index ends.
        following: A and B of the batch index after this one, and whether there is one; None if this is it.
    """

    a: Value
    b: Value
    c: Value
    batch: Index
    k: Index
    depth: Index
    later: Value
    last: Value
    rows: tuple[Index, Index]
    panels: tuple[Index, Index]
    end: Index
    following: tuple[Value, Value, Value] | None


@dataclass
class _Next:
    """What comes after all rows of a block, if it `exists`: its matrices, chunk of K, and group of strips."""

    exists: Value
    a: Value
    b: Value
    k: Value
    panel: Value


class Operands:
    """The operands of a kernel under construction; calls of packing functions add these to `shared`.

    Args:
        places: bytes of the workspace before A's copy and before B's.
    """

    def __init__(
        self,
        f: FunctionBuilder,
        gemm: Gemm,
        tiling: Tiling,
        places: tuple[int, int],
        shared: dict[str, SharedFunction],
    ) -> None:
        self.f = f
        self.gemm = gemm
        self.tiling = tiling
        self.shared = shared
        self.step_bytes = 8 if tiling.step == "f64" else 4
        self._place_a, self._place_b = (f.offset(f.arguments["workspace"], place) for place in places)
        self._next_a, self._next_b = Fetch(f), Fetch(f)
        # Packed strips of one group of columns are read again by each row block: from L2 if half of it
        # holds them, else from the last level, and then they are fetched, too.
        strip_bytes = tiling.kc * tiling.width * (2 if tiling.step == "bf16x2" else BYTES[tiling.step])
        self._copies_leave = tiling.panels * strip_bytes > f.target.l2_bytes // 2

    def steps(self, depth: Index) -> Index:
        f = self.f
        return f.idiv(f.iadd(depth, 1), 2) if self.tiling.step == "bf16x2" else depth

    def fetch(self, row: Index, panel: Index) -> Value:
        """What a tile fetches: alternately from two, and the rest of one when the other is done."""
        f = self.f
        # Tiles alternate in a fixed ratio, which counts along rows and strips so that neighbouring tiles
        # differ. B takes what A leaves, and A what B leaves, except before `_late`: lines of A that come
        # too early are evicted by the strips in between.
        number = f.irem(f.iadd(f.idiv(row, self.tiling.rows), panel), _FETCHES)
        for_a = f.compare("eq", f.index(number), constant(_FETCHES - 1, "i64"))
        for_a = f.or_(for_a, self._next_b.is_done())
        for_a = f.and_(for_a, f.not_(f.or_(self._less(panel, self._late), self._next_a.is_done())))
        return f.select(for_a, self._next_a.place, self._next_b.place)

    # -- A ---------------------------------------------------------------------------------------------------
    def begin_rows(self, block: Block, start: Index, end: Index) -> None:
        """Before the tiles of a row block: its copy, and the fetch of the rows after it."""
        if self.tiling.pack_a:
            self._pack_rows(block, start, end)
        # Without strides of one a run of lines would be one element each: nothing is fetched.
        self._next_a.nothing(block.a)
        self._late = self.f.isub(block.panels[1], self._strips_for_rows())
        if 1 in (self.gemm.a.row_stride, self.gemm.a.column_stride):
            self._fetch_rows(block, end)

    def _strips_for_rows(self) -> int:
        """Strips in whose tiles the rows that come next can be fetched: earlier they would be lost again."""
        t = self.tiling
        steps = t.kc // 2 if t.step == "bf16x2" else t.kc
        # How many tiles it takes to fetch the next row block: its lines, through one tile in `_FETCHES`. A
        # micro-kernel whose rows of A have addresses of their own fetches a line at each step; others one
        # in two steps, and more of them in the last steps.
        lines = t.mc * steps * self.step_bytes // LINE_BYTES * 5 // 4  # some lie in part outside of the rows
        by_tile = steps if self.gemm.a.column_stride == 1 and not t.pack_a else steps // 2 + 36
        return 1 + -(-lines * _FETCHES // (by_tile * (t.mc // t.rows)))

    def tile(self, block: Block, start: Index, row: Index) -> tuple[str, Value, int]:
        """(contiguous dim, address, stride in bytes) of A's part of a tile."""
        t, a = self.tiling, self.gemm.a
        if t.pack_a:
            return "rows", self._packed_rows(block, start, row), t.rows * self.step_bytes
        address = self._element(block.a, a, row, block.k)
        if a.column_stride == 1:
            return "steps", address, a.row_stride * BYTES[a.dtype]
        return "rows", address, a.column_stride * BYTES[a.dtype]

    def _packed_rows(self, block: Block, start: Index, row: Index) -> Value:
        f = self.f
        before = f.imul(f.isub(row, start), self.steps(block.depth))
        return f.offset(self._place_a, f.imul(before, self.step_bytes))

    def _pack_rows(self, block: Block, start: Index, end: Index) -> None:
        f, t, a = self.f, self.tiling, self.gemm.a
        pack = Pack(a.dtype, t.step, t.rows, adjacency(a.row_stride, a.column_stride))
        together = t.mc if pack.many_strips(f.target) else t.rows
        with f.loop(start, end, together) as strip:
            self._call_pack(
                pack,
                self._element(block.a, a, strip.i, block.k),
                (a.row_stride, a.column_stride),
                block.depth,
                f.imin(f.isub(end, strip.i), together),
                self._packed_rows(block, start, strip.i),
            )

    def _fetch_rows(self, block: Block, end: Index) -> None:
        """Fetch the rows that come after a block: the next ones, or the first ones of the next block of B."""
        f, t, gemm, a = self.f, self.tiling, self.gemm, self.gemm.a
        size = BYTES[a.dtype]
        # The rows after this block meet the same strips; after the last block the first rows come again,
        # with the next chunk of K, group of strips or batch index.
        after, other = self._less(end, block.rows[1]), self._next(block)
        row = f.select(after, f.index(end), f.index(block.rows[0]))
        k, start = f.select(after, f.index(block.k), other.k), f.select(after, block.a, other.a)
        with f.when(f.or_(after, other.exists)):
            rows, depth = f.imin(f.isub(block.rows[1], row), t.mc), f.imin(f.isub(gemm.k, k), t.kc)
            source = self._element(start, a, row, k)
            if a.column_stride == 1:
                self._next_a.runs(source, rows, a.row_stride * size, f.imul(depth, size))
            else:
                self._next_a.runs(source, depth, a.column_stride * size, f.imul(rows, size))

    def _less(self, a: Index, b: Index) -> Value:
        return self.f.compare("slt", self.f.index(a), self.f.index(b))

    def _next(self, block: Block) -> _Next:
        f, zero = self.f, self.f.index(0)
        # The loops in which blocks follow each other, from the inside out: K, groups of strips, batch
        # indices. Whichever advances, those inside of it start anew.
        k, panel = f.index(f.iadd(block.k, self.tiling.kc)), f.index(block.panels[1])
        deeper, wider = self._less(k, self.gemm.k), self._less(panel, block.end)
        here = f.or_(deeper, wider)
        k, panel = f.select(deeper, k, zero), f.select(deeper, f.index(block.panels[0]), panel)
        if block.following is None:
            return _Next(here, block.a, block.b, k, panel)
        a, b, exists = block.following
        a, b = f.select(here, block.a, a), f.select(here, block.b, b)
        return _Next(f.or_(here, exists), a, b, k, f.select(here, panel, zero))

    # -- B ---------------------------------------------------------------------------------------------------
    def begin_strip(self, block: Block, start: Index, end: Index, panel: Index, *, packed: bool) -> None:
        """Before the tiles of a strip: its copy, in the first row block, and the fetch of the next strip."""
        f = self.f
        if packed:
            with self._first_rows(block, start):
                self._pack_strip(block, panel)
        inside = self._less(f.iadd(panel, 1), block.panels[1])
        here = f.or_(inside, self._less(end, block.rows[1]))  # where not, the first strip comes again
        after, other = (
            f.select(inside, f.index(f.iadd(panel, 1)), f.index(block.panels[0])),
            self._next(block),
        )
        self._next_b.nothing(block.b)
        with f.when(f.or_(here, other.exists)):
            # What the next tiles read is the copy of their strip if it is made already: by an earlier row
            # block, or, for the first strip of the group, earlier in this one. Copies that stay in L2 need
            # no fetch; elements do, in time for the copy that is made of them.
            if self.tiling.pack_b and self._copies_leave:
                copied = f.or_(self._less(block.rows[0], start), f.not_(inside))
                copied = f.and_(here, copied)
                with f.when(copied):
                    size = f.imul(self.steps(block.depth), self.tiling.width * self.step_bytes)
                    self._next_b.runs(self._packed_strip(block, after), 1, size, size)
                with f.when(f.not_(copied)):
                    self._fetch_strip(block, here, after, other)
            elif packed:
                first = f.and_(inside, f.not_(self._less(block.rows[0], start)))
                with f.when(f.or_(first, f.not_(here))):
                    self._fetch_strip(block, here, after, other)
            else:
                self._fetch_strip(block, here, after, other)

    def strip(self, block: Block, panel: Index, *, packed: bool) -> tuple[Value, int]:
        """(address, stride in bytes) of B's strip."""
        t, b = self.tiling, self.gemm.b
        # A step of bf16 pairs takes two rows of B side by side: such a B is always packed.
        if packed:
            return self._packed_strip(block, panel), t.width * self.step_bytes
        source = self._element(block.b, b, block.k, self.f.imul(panel, t.width))
        return source, b.row_stride * self.step_bytes

    @contextlib.contextmanager
    def _first_rows(self, block: Block, start: Index) -> Iterator[None]:
        f = self.f
        with f.when(f.compare("eq", f.index(start), f.index(block.rows[0]))):
            yield

    def _packed_strip(self, block: Block, panel: Index) -> Value:
        f, t = self.f, self.tiling
        first = block.panels[0] if t.pack_b else self.gemm.n // t.width  # only the strip at the edge is
        before = f.imul(f.isub(panel, first), self.steps(block.depth))
        return f.offset(self._place_b, f.imul(before, t.width * self.step_bytes))

    def _pack_strip(self, block: Block, panel: Index) -> None:
        f, t, b = self.f, self.tiling, self.gemm.b
        pack = Pack(b.dtype, t.step, t.width, adjacency(b.column_stride, b.row_stride))
        column = f.imul(panel, t.width)
        self._call_pack(
            pack,
            self._element(block.b, b, block.k, column),
            (b.column_stride, b.row_stride),
            block.depth,
            f.imin(f.isub(self.gemm.n, column), t.width),
            self._packed_strip(block, panel),
        )

    def _fetch_strip(self, block: Block, here: Value, panel: Value, other: _Next) -> None:
        f, t, b = self.f, self.tiling, self.gemm.b
        k, start = f.select(here, f.index(block.k), other.k), f.select(here, block.b, other.b)
        size, column = BYTES[b.dtype], f.imul(f.select(here, panel, other.panel), t.width)
        source = self._element(start, b, k, column)
        columns, depth = f.imin(f.isub(self.gemm.n, column), t.width), f.imin(f.isub(self.gemm.k, k), t.kc)
        if b.column_stride == 1:
            self._next_b.runs(source, depth, b.row_stride * size, f.imul(columns, size))
        elif b.row_stride == 1:
            self._next_b.runs(source, columns, b.column_stride * size, f.imul(depth, size))

    # -- both ------------------------------------------------------------------------------------------------
    def _element(self, start: Value, matrix: Matrix, row: Index, column: Index) -> Value:
        f = self.f
        at = f.iadd(f.imul(row, matrix.row_stride), f.imul(column, matrix.column_stride))
        return f.offset(start, f.imul(at, BYTES[matrix.dtype]))

    def _call_pack(
        self,
        pack: Pack,
        source: Value,
        strides: tuple[int, int],
        depth: Index,
        valid: Index,
        destination: Value,
    ) -> None:
        f, size = self.f, BYTES[pack.dtype]
        self.shared[pack.name] = pack
        sizes = [f.index(x) for x in (strides[0] * size, strides[1] * size, depth, valid)]
        f.call(pack.name, source, *sizes, destination)
