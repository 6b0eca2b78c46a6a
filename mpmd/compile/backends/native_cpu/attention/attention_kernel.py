"""The kernel of an attention plan: packed strips of keys and values, then one block of queries at a time.

    void name(ptr ..., ptr workspace, i64 begin, i64 end)

A unit is one batch index, or one block of queries of it where nothing is summed over queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.attention.attention_rows import BlockRows, Reach
from mpmd.compile.backends.native_cpu.attention.blocking import Blocking, Tile
from mpmd.compile.backends.native_cpu.gemm.finish import FinishTile
from mpmd.compile.backends.native_cpu.gemm.micro_kernel import Fetch, MicroKernel, TileCall
from mpmd.compile.backends.native_cpu.gemm.packing import Pack
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.gemm.tiling import Tiling, adjacency
from mpmd.compile.backends.native_cpu.kernels.places import product, unflatten
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.kernels.product_plans import KEYS, QUERIES, AttentionPlan, View
from mpmd.compile.llvm.cpu import LINE_BYTES, CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index, Module
from mpmd.compile.llvm.llvm_types import Value, constant, vector


@dataclass(frozen=True)
class AttentionKernel:
    """An attention plan, ready to be emitted.

    Attributes:
        name: its symbol.
        plan: what it computes.
        target: for which CPU.
    """

    name: str
    plan: AttentionPlan
    target: CpuTarget

    @cached_property
    def blocking(self) -> Blocking:
        return Blocking(self.plan, self.target)

    @property
    def pointers(self) -> tuple[str, ...]:
        """`a0`, `b0` ... of the scores, `p0` ... of the rows, `w0`, `c0` ... of the mixtures."""
        plan = self.plan
        factors = [f"{side}{k}" for k in range(len(plan.scores)) for side in "ab"]
        mixed = [f"{side}{k}" for k in range(len(plan.mixtures)) for side in "wc"]
        return (*factors, *(f"p{k}" for k in plan.outer), *mixed)

    @property
    def units(self) -> int:
        batch = product(self.plan.batch, range(len(self.plan.batch)))
        return batch * (self.blocking.blocks if self.blocking.is_divided else 1)

    @property
    def workspace_bytes(self) -> int:
        return self.blocking.places["size"] + BlockRows.kept_bytes(self.blocking)

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module; returns the shared functions that it calls."""
        return _Emission(self, module).emit()


class _Emission:
    """The work on one kernel."""

    def __init__(self, kernel: AttentionKernel, module: Module) -> None:
        self.kernel = kernel
        self.plan = kernel.plan
        self.tiling = kernel.blocking
        self.module = module
        self.shared: dict[str, SharedFunction] = {}
        self.finishes = [self._finish(k) for k in range(len(self.plan.mixtures))]

    def emit(self) -> list[SharedFunction]:
        kernel, plan, tiling = self.kernel, self.plan, self.tiling
        for mixture, finish in zip(plan.mixtures, self.finishes):
            for edge in _edges(mixture.width, finish.width):
                finish.emit(self.module, edge=edge)
        arguments = [(p, "ptr") for p in (*kernel.pointers, "workspace")]
        with FunctionBuilder(self.module, kernel.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            self.f = f
            self.fetch = Fetch(f)
            self.fetch.nothing(f.arguments["workspace"])  # a block's strips are near
            rows = {k: f.arguments[f"p{k}"] for k in plan.outer}
            inner = {k: self._workspace(f"p{tiling.shared.get(k, k)}") for k in sorted(plan.inner)}
            self.rows = BlockRows(f, tiling, rows, inner, self._workspace("size"))
            each = tiling.blocks if tiling.is_divided else 1
            begin, end = f.arguments["begin"], f.arguments["end"]
            with f.loop(f.idiv(begin, each), f.idiv(f.iadd(end, each - 1), each)) as batch:
                if tiling.is_divided:
                    base = f.imul(batch.i, each)
                    blocks = f.imax(f.isub(begin, base), 0), f.imin(f.isub(end, base), each)
                else:
                    blocks = 0, tiling.blocks
                self._batch(batch.i, blocks)
        return [self.shared[name] for name in sorted(self.shared)]

    def _finish(self, number: int) -> FinishTile:
        plan, mixture, tile = self.plan, self.plan.mixtures[number], self.tiling.mixtures[number]
        over = mixture.over == KEYS
        m, k = (plan.queries, plan.keys) if over else (plan.keys, plan.queries)
        c = mixture.c
        target = Matrix(c.dtype, c.row, c.column, c.batch)
        gemm = Gemm(m, mixture.width, k, target, target, target, plan.batch)
        tiling = Tiling(
            tile.step, tile.rows, tile.vectors, tile.width, 2, tile.rows, 1, True, True, "columns"
        )
        return FinishTile(f"{self.kernel.name}_mixture{number}", gemm, tiling.width, None)

    # -- addresses
    def _workspace(self, part: str) -> Value:
        return self.f.offset(self.f.arguments["workspace"], self.tiling.places[part])

    def _matrix(self, name: str, view: View, dims: dict[int, Index]) -> Value:
        """Where a view's matrix of a batch index begins."""
        f = self.f
        offset: Index = 0
        for d, stride in enumerate(view.batch):
            offset = f.iadd(offset, f.imul(dims[d], stride))
        return f.offset(f.arguments[name], f.imul(offset, BYTES[view.dtype]))

    def _pack(self, pack: Pack, *arguments: Index) -> None:
        self.shared[pack.name] = pack
        self.f.call(pack.name, *(self.f.index(a) for a in arguments))

    def _multiply(
        self,
        micro: MicroKernel,
        *,
        a: Value,
        a_stride: Index,
        b: Value,
        b_stride: Index,
        depth: Index,
        sums: Value,
        stride: Index,
        accumulate: Index = 0,
    ) -> None:
        """Call a micro-kernel that writes to some sums, or adds to them; see its `ARGUMENTS`."""
        self.shared[micro.name] = micro
        TileCall(
            a=a,
            a_stride=a_stride,
            b=b,
            b_stride=b_stride,
            fetch=self.fetch.place,
            depth=depth,
            s=sums,
            s_stride=stride,
            d=sums,
            d_stride=stride,
            accumulate=accumulate,
            near=sums,
            near_stride=stride,
            near_line=LINE_BYTES,
        ).emit(self.f, micro)

    # -- one batch index
    def _batch(self, batch: Value, blocks: tuple[Index, Index]) -> None:
        f, plan, tiling = self.f, self.plan, self.tiling
        dims = unflatten(f, batch, range(len(plan.batch)), plan.batch)
        self.sides = {}
        for k, (score, tile) in enumerate(zip(plan.scores, tiling.scores)):
            self.sides[f"a{k}"] = self._matrix(f"a{k}", score.a, dims)
            keys = View(score.b.dtype, 0, score.b.column, score.b.row)
            self._pack_strips(
                f"b{k}", self._matrix(f"b{k}", score.b, dims), keys, tile, plan.keys, score.depth
            )
        for k, (mixture, tile) in enumerate(zip(plan.mixtures, tiling.mixtures)):
            self.sides[f"w{k}"] = self._matrix(f"w{k}", mixture.w, dims)
            if mixture.over == KEYS:
                values = View(mixture.w.dtype, 0, mixture.w.column, mixture.w.row)
                self._pack_strips(f"w{k}", self.sides[f"w{k}"], values, tile, mixture.width, plan.keys)
            else:
                self._clear(k)
        scope = self.rows.start.inside(dims)
        scope.hoist(range(len(self.rows.plan.nodes)), tiling.lanes)
        with f.loop(blocks[0], blocks[1]) as block:
            first = f.index(f.imul(block.i, tiling.block))
            count = f.imin(f.isub(plan.queries, first), tiling.block)
            self._block(scope, batch, first, count)
        for k, mixture in enumerate(plan.mixtures):
            if mixture.over == QUERIES:
                self._store_sums(k, batch)

    def _pack_strips(
        self, part: str, source: Value, view: View, tile: Tile, columns: int, depth: Index
    ) -> None:
        """Copy a factor into strips; `view` has the distances of columns as rows and of steps as columns."""
        f, size = self.f, BYTES[view.dtype]
        pack = Pack(view.dtype, tile.step, tile.width, adjacency(view.row, view.column))
        steps = self._steps(tile, depth)
        with f.loop(0, self.tiling.panels(tile, columns)) as panel:
            column = f.imul(panel.i, tile.width)
            self._pack(
                pack,
                f.offset(source, f.imul(column, view.row * size)),
                view.row * size,
                view.column * size,
                depth,
                f.imin(f.isub(columns, column), tile.width),
                f.offset(self._workspace(part), f.imul(panel.i, f.imul(steps, tile.row_bytes))),
            )

    def _steps(self, tile: Tile, depth: Index) -> Index:
        return self.f.idiv(self.f.iadd(depth, 1), 2) if tile.step == "bf16x2" else depth

    def _clear(self, number: int) -> None:
        f, tiling, tile = self.f, self.tiling, self.tiling.mixtures[number]
        panels = tiling.panels(tile, self.plan.mixtures[number].width)
        zero = constant(0.0, vector("float", tiling.lanes))
        with f.loop(0, panels * tiling.padded_rows * tile.width, tiling.lanes) as loop:
            f.store(zero, self._workspace(f"t{number}"), loop.i)

    def _store_sums(self, number: int, batch: Value) -> None:
        """Write the sums over queries where they belong."""
        f, tiling, plan = self.f, self.tiling, self.plan
        mixture, tile, finish = plan.mixtures[number], tiling.mixtures[number], self.finishes[number]
        whole = mixture.width // tile.width
        for edge in _edges(mixture.width, tile.width):
            low, high = (whole, whole + 1) if edge else (0, whole)
            with f.loop(low, high) as panel:
                at = f.imul(panel.i, tiling.padded_rows * tile.row_bytes)
                sums = f.offset(self._workspace(f"t{number}"), at)
                column = f.index(f.imul(panel.i, tile.width))
                c = f.arguments[f"c{number}"]
                f.call(finish.name(edge=edge), sums, f.index(plan.keys), f.index(0), column, batch, c)

    # -- one block of queries
    def _block(self, scope: Scope, batch: Value, first: Value, count: Index) -> None:
        f, plan, tiling = self.f, self.plan, self.tiling
        for k in range(len(plan.scores)):
            self._pack_queries(k, first, count)
        if plan.triangle is None:
            reach = Reach(f, tiling, first, None)
            self._scores(count, reach)
            self.rows.emit(scope, count, reach)
        else:
            place, everything = f.stack("i64"), constant(plan.queries + plan.keys, "i64")
            f.store(constant(plan.triangle.offset, "i64"), place)
            with f.repeat() as leave_if:  # once, or once more over all keys
                offset = f.load(place, "i64")
                reach = Reach(f, tiling, first, offset)
                self._scores(count, reach)
                fine = self.rows.emit(scope, count, reach)
                leave_if(f.or_(fine, f.compare("eq", offset, everything)))
                f.store(everything, place)
            reach = Reach(f, tiling, first, f.load(place, "i64"))
        for k, mixture in enumerate(plan.mixtures):
            if mixture.over == KEYS:
                self._mix_keys(k, batch, count, reach)
            else:
                self._mix_queries(k, count, reach)

    def _pack_queries(self, number: int, first: Value, count: Index) -> None:
        """Pack the block's rows of a score's first factor."""
        f, score, tile = self.f, self.plan.scores[number], self.tiling.scores[number]
        a, size = score.a, BYTES[score.a.dtype]
        pack = Pack(a.dtype, tile.step, tile.rows, adjacency(a.row, a.column))
        with f.loop(0, count, tile.rows) as row:
            source = f.imul(f.iadd(first, row.i), a.row * size)
            place = f.imul(row.i, tile.steps(score.depth) * 4)
            self._pack(
                pack,
                f.offset(self.sides[f"a{number}"], source),
                a.row * size,
                a.column * size,
                score.depth,
                f.imin(f.isub(count, row.i), tile.rows),
                f.offset(self._workspace(f"a{number}"), place),
            )

    def _scores(self, count: Index, reach: Reach) -> None:
        """All products of the block before its rows."""
        f, tiling = self.f, self.tiling
        for k, (score, tile) in enumerate(zip(self.plan.scores, tiling.scores)):
            steps = tile.steps(score.depth)
            sums = self._workspace(f"p{score.sums}")
            with f.loop(0, f.idiv(reach.end(count), tile.width)) as panel:
                strip = f.offset(self._workspace(f"b{k}"), f.imul(panel.i, steps * tile.row_bytes))
                column = f.offset(sums, f.imul(panel.i, tile.row_bytes))

                def tiles(
                    row: Value, rows: int, strip: Value = strip, column: Value = column, k: int = k
                ) -> None:
                    score, tile = self.plan.scores[k], tiling.scores[k]
                    steps = tile.steps(score.depth)
                    a = f.offset(self._workspace(f"a{k}"), f.imul(row, steps * 4))
                    d = f.offset(column, f.imul(row, tiling.line * 4))
                    micro = MicroKernel(tile.step, rows, tile.vectors, "rows")
                    line = tiling.line * 4
                    self._multiply(
                        micro,
                        a=a,
                        a_stride=tile.rows * 4,
                        b=strip,
                        b_stride=tile.row_bytes,
                        depth=steps,
                        sums=d,
                        stride=line,
                    )

                self._each_tile(reach.first_row(f.imul(panel.i, tile.width), tiling.rows), count, tiles)

    def _each_tile(self, low: Index, count: Index, tiles: Callable[[Value, int], None]) -> None:
        """Whole register tiles of the block's rows from `low` on, then the remainder of the last block."""
        f, rows, left = self.f, self.tiling.rows, self.plan.queries % self.tiling.rows
        whole = f.floor_to(count, rows)
        with f.loop(low, whole, rows) as tile:
            tiles(tile.i, rows)
        if left:
            with f.loop(f.imax(low, whole), count, rows) as tile:
                tiles(tile.i, left)

    def _mix_keys(self, number: int, batch: Value, count: Index, reach: Reach) -> None:
        """Rows of factors times all values up to the last key that matters."""
        f, tiling, plan = self.f, self.tiling, self.plan
        mixture, tile, finish = plan.mixtures[number], tiling.mixtures[number], self.finishes[number]
        factor = self.rows.inner[mixture.factor]
        size = BYTES[tiling.local_rows.operands[mixture.factor].dtype]
        sums, c = self._workspace(f"t{number}"), f.arguments[f"c{number}"]
        strip_bytes = tile.steps(plan.keys) * tile.row_bytes
        for edge in _edges(mixture.width, tile.width):
            whole = mixture.width // tile.width
            low, high = (whole, whole + 1) if edge else (0, whole)
            with f.loop(low, high) as panel:
                strip = f.offset(self._workspace(f"w{number}"), f.imul(panel.i, strip_bytes))
                column = f.index(f.imul(panel.i, tile.width))

                def tiles(
                    row: Value, rows: int, strip: Value = strip, column: Value = column, edge: bool = edge
                ) -> None:
                    a = f.offset(factor, f.imul(row, tiling.line * size))
                    micro = MicroKernel(tile.step, rows, tile.vectors, "steps")
                    keys = f.imin(reach.end(f.iadd(row, rows)), plan.keys)
                    self._multiply(
                        micro,
                        a=a,
                        a_stride=tiling.line * size,
                        b=strip,
                        b_stride=tile.row_bytes,
                        depth=self._steps(tile, keys),
                        sums=sums,
                        stride=tile.row_bytes,
                    )
                    at = f.index(f.iadd(reach.first, row))
                    f.call(finish.name(edge=edge), sums, f.index(rows), at, column, batch, c)

                self._each_tile(0, count, tiles)

    def _mix_queries(self, number: int, count: Index, reach: Reach) -> None:
        """Add the block's columns of factors times its rows of values to the sums over queries."""
        f, tiling = self.f, self.tiling
        mixture, tile = self.plan.mixtures[number], tiling.mixtures[number]
        w, size = mixture.w, BYTES[mixture.w.dtype]
        values = View(w.dtype, 0, w.column, w.row)
        source = f.offset(self.sides[f"w{number}"], f.imul(reach.first, w.row * size))
        self._pack_strips(f"w{number}", source, values, tile, mixture.width, count)
        factor, line = self.rows.inner[mixture.factor], tiling.line
        steps = self._steps(tile, count)
        micro = MicroKernel(tile.step, tile.rows, tile.vectors, "rows")
        with f.loop(0, reach.seen(count), tile.rows) as key:
            low = reach.first_row(key.i, 2)  # the rows before it have zeros there
            if tile.step == "bf16x2":
                a, stride = self._packed_columns(number, key.i, low, count), tile.rows * 4
            else:
                a = f.offset(factor, f.imul(f.iadd(f.imul(low, line), key.i), 4))
                stride = line * 4
            skipped = self._steps(tile, low)
            with f.loop(0, tiling.panels(tile, mixture.width)) as panel:
                at = f.iadd(f.imul(panel.i, steps), skipped)
                strip = f.offset(self._workspace(f"w{number}"), f.imul(at, tile.row_bytes))
                at = f.iadd(f.imul(panel.i, tiling.padded_rows), key.i)
                sums = f.offset(self._workspace(f"t{number}"), f.imul(at, tile.row_bytes))
                self._multiply(
                    micro,
                    a=a,
                    a_stride=stride,
                    b=strip,
                    b_stride=tile.row_bytes,
                    depth=f.isub(steps, skipped),
                    sums=sums,
                    stride=tile.row_bytes,
                    accumulate=1,
                )

    def _packed_columns(self, number: int, key: Value, low: Index, count: Index) -> Value:
        """A tile of columns of a factor from row `low` on, its rows in pairs."""
        f, tiling, mixture = self.f, self.tiling, self.plan.mixtures[number]
        tile = tiling.mixtures[number]
        place = self._workspace(f"x{number}")
        at = f.iadd(f.imul(low, tiling.line), key)
        source = f.offset(self.rows.inner[mixture.factor], f.imul(at, 2))
        pack = Pack("bf16", tile.step, tile.rows, "lanes")
        self._pack(pack, source, 2, tiling.line * 2, f.isub(count, low), tile.rows, place)
        return place


def _edges(columns: int, width: int) -> list[bool]:
    """Whether there are whole strips, and whether there is one at the edge."""
    return [edge for edge, there in ((False, columns >= width), (True, columns % width > 0)) if there]
