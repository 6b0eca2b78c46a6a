"""The kernel of an attention plan: packed strips of keys and values, then one block of queries at a time.

    void name(ptr ..., ptr workspace, i64 begin, i64 end)

    for each batch index:
      pack keys, and values that are mixed over keys
      for each block of queries:                     its scores and factors stay in L2
        pack the queries
        scores    queries · keys                     micro-kernels
        rows      softmax and whatever follows it    passes over each row, see `attention_rows.py`
        mixtures  factors · values                   micro-kernels; sums over queries stay until the end
      store the sums over queries

A unit is one batch index, or one block of queries of it where nothing is summed over queries: sums over
queries are added up in one thread's workspace, so that their order does not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.attention.attention_rows import BlockRows, Reach
from mpmd.compile.backends.native_cpu.attention.blocking import Blocking, Tile
from mpmd.compile.backends.native_cpu.gemm.finish import FinishTile
from mpmd.compile.backends.native_cpu.gemm.micro_kernel import Fetch, MicroKernel, Rows
from mpmd.compile.backends.native_cpu.gemm.packing import Pack
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.gemm.tiling import adjacency
from mpmd.compile.backends.native_cpu.kernels.places import product, unflatten
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.shared import SharedFunction, kernel_function
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.kernels.product_plans import KEYS, AttentionPlan, View
from mpmd.compile.llvm.cpu import LINE_BYTES, CpuTarget
from mpmd.compile.llvm.function_builder import Index, Module
from mpmd.compile.llvm.llvm_types import Value, constant, vector


@dataclass(frozen=True)
class AttentionKernel:
    """An attention plan, ready to be emitted for a CPU; see `CpuKernel`."""

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
    """Emission of one kernel, from the loop over batch indices inwards."""

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
            for edge, _, _ in _strips(mixture.width, finish.width):
                finish.emit(self.module, edge=edge)
        with kernel_function(self.module, kernel) as f:
            self.f = f
            # micro-kernels always fetch something: here nothing, as packed strips are near already
            self.fetch = Fetch(f)
            self.fetch.nothing(f.arguments["workspace"])
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
        plan, mixture = self.plan, self.plan.mixtures[number]
        m, k = (plan.queries, plan.keys) if mixture.over == KEYS else (plan.keys, plan.queries)
        c = Matrix(mixture.c.dtype, mixture.c.row, mixture.c.column, mixture.c.batch)
        gemm = Gemm(m, mixture.width, k, c, c, c, plan.batch)
        return FinishTile(
            f"{self.kernel.name}_mixture{number}", gemm, self.tiling.mixtures[number].width, None
        )

    # -- shared by all steps
    def _workspace(self, part: str) -> Value:
        return self.f.offset(self.f.arguments["workspace"], self.tiling.places[part])

    def _steps(self, tile: Tile, depth: Index) -> Index:
        return self.f.idiv(self.f.iadd(depth, 1), 2) if tile.step == "bf16x2" else depth

    def _pack(self, pack: Pack, *arguments: Index) -> None:
        self.shared[pack.name] = pack
        self.f.call(pack.name, *(self.f.index(a) for a in arguments))

    def _pack_strips(
        self, part: str, source: Value, view: View, tile: Tile, columns: int, depth: Index
    ) -> None:
        """Copy a right factor; `view` has the distance of its columns as rows, along the sum as columns."""
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

    def _multiply(
        self, micro: MicroKernel, a: Rows, b: Rows, depth: Index, sums: Rows, accumulate: Index = 0
    ) -> None:
        self.shared[micro.name] = micro
        micro.call(self.f, a, b, self.fetch.place, depth, sums, sums, (*sums, LINE_BYTES), accumulate)

    def _tiles(self, low: Index, count: Index) -> Iterator[tuple[Value, int]]:
        """Row and height of each register tile of the block from `low` on; the caller's code is in a loop.

        Only the last block has rows that fill no tile: the second loop runs at most once, in it.
        """
        f, rows, left = self.f, self.tiling.rows, self.plan.queries % self.tiling.rows
        whole = f.floor_to(count, rows)
        with f.loop(low, whole, rows) as tile:
            yield tile.i, rows
        if left:
            with f.loop(f.imax(low, whole), count, rows) as tile:
                yield tile.i, left

    # -- the steps
    def _batch(self, batch: Value, blocks: tuple[Index, Index]) -> None:
        f, plan, tiling = self.f, self.plan, self.tiling
        dims = unflatten(f, batch, range(len(plan.batch)), plan.batch)

        def matrix(name: str, view: View) -> Value:
            offset: Index = 0
            for d, stride in enumerate(view.batch):
                offset = f.iadd(offset, f.imul(dims[d], stride))
            return f.offset(f.arguments[name], f.imul(offset, BYTES[view.dtype]))

        self.sides = {}
        for k, (score, tile) in enumerate(zip(plan.scores, tiling.scores)):
            self.sides[f"a{k}"] = matrix(f"a{k}", score.a)
            # each strip is of some keys, along the depth: rows and columns change places
            keys = View(score.b.dtype, 0, score.b.column, score.b.row)
            self._pack_strips(f"b{k}", matrix(f"b{k}", score.b), keys, tile, plan.keys, score.depth)
        for k, (mixture, tile) in enumerate(zip(plan.mixtures, tiling.mixtures)):
            self.sides[f"w{k}"] = matrix(f"w{k}", mixture.w)
            if mixture.over == KEYS:
                values = View(mixture.w.dtype, 0, mixture.w.column, mixture.w.row)
                self._pack_strips(f"w{k}", self.sides[f"w{k}"], values, tile, mixture.width, plan.keys)
                continue
            # all blocks of queries add to these sums, [panel][key][column of the panel]
            size = tiling.panels(tile, mixture.width) * tiling.padded_rows * tile.width
            zero = constant(0.0, vector("float", tiling.lanes))
            with f.loop(0, size, tiling.lanes) as loop:
                f.store(zero, self._workspace(f"t{k}"), loop.i)
        scope = self.rows.start.inside(dims)
        scope.hoist(range(len(self.rows.plan.nodes)), tiling.lanes)
        with f.loop(blocks[0], blocks[1]) as block:
            first = f.index(f.imul(block.i, tiling.block))
            count = f.imin(f.isub(plan.queries, first), tiling.block)
            self._block(scope, batch, first, count)
        for k, (mixture, tile, finish) in enumerate(zip(plan.mixtures, tiling.mixtures, self.finishes)):
            if mixture.over == KEYS:
                continue
            for edge, low, high in _strips(mixture.width, tile.width):
                with f.loop(low, high) as panel:
                    at = f.imul(panel.i, tiling.padded_rows * tile.row_bytes)
                    sums = f.offset(self._workspace(f"t{k}"), at)
                    column = f.imul(panel.i, tile.width)
                    c = f.arguments[f"c{k}"]
                    finish.call(f, sums, plan.keys, 0, column, batch, [c], edge=edge)

    def _block(self, scope: Scope, batch: Value, first: Value, count: Index) -> None:
        f, plan, tiling = self.f, self.plan, self.tiling
        for k, (score, tile) in enumerate(zip(plan.scores, tiling.scores)):
            a, size = score.a, BYTES[score.a.dtype]
            pack = Pack(a.dtype, tile.step, tile.rows, adjacency(a.row, a.column))
            with f.loop(0, count, tile.rows) as row:
                source = f.imul(f.iadd(first, row.i), a.row * size)
                place = f.imul(row.i, tile.steps(score.depth) * 4)
                self._pack(
                    pack,
                    f.offset(self.sides[f"a{k}"], source),
                    a.row * size,
                    a.column * size,
                    score.depth,
                    f.imin(f.isub(count, row.i), tile.rows),
                    f.offset(self._workspace(f"a{k}"), place),
                )
        if plan.triangle is None:
            reach = Reach(f, tiling, first, None)
            self._scores(count, reach)
            self.rows.emit(scope, count, reach)
        else:
            # A causal mask leaves scores out on the condition that masked elements count as nothing beside
            # those of their row.  Whether they do shows when the rows are done: where a row does not meet
            # the guards, the block is done once more over all keys, which such an offset lets each row see.
            place, everything = f.stack("i64"), constant(plan.queries + plan.keys, "i64")
            f.store(constant(plan.triangle.offset, "i64"), place)
            with f.repeat() as leave_if:
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

    def _scores(self, count: Index, reach: Reach) -> None:
        f, tiling = self.f, self.tiling
        line = tiling.line * 4
        for k, (score, tile) in enumerate(zip(self.plan.scores, tiling.scores)):
            steps = tile.steps(score.depth)
            sums = self._workspace(f"p{score.sums}")
            with f.loop(0, f.idiv(reach.end(count), tile.width)) as panel:
                strip = f.offset(self._workspace(f"b{k}"), f.imul(panel.i, steps * tile.row_bytes))
                column = f.offset(sums, f.imul(panel.i, tile.row_bytes))
                # Rows that see no key of the strip are skipped. Their sums in it are old ones, which no row
                # reads: each is read up to the end of the last strip that has a key it sees.
                low = reach.first_row(f.imul(panel.i, tile.width), tiling.rows)
                for row, rows in self._tiles(low, count):
                    a = f.offset(self._workspace(f"a{k}"), f.imul(row, steps * 4))
                    d = f.offset(column, f.imul(row, line))
                    micro = MicroKernel(tile.step, rows, tile.vectors, "rows")
                    self._multiply(micro, (a, tile.rows * 4), (strip, tile.row_bytes), steps, (d, line))

    def _mix_keys(self, number: int, batch: Value, count: Index, reach: Reach) -> None:
        f, tiling, plan = self.f, self.tiling, self.plan
        mixture, tile, finish = plan.mixtures[number], tiling.mixtures[number], self.finishes[number]
        factor = self.rows.inner[mixture.factor]
        line = tiling.line * BYTES[tiling.local_rows.operands[mixture.factor].dtype]
        sums, c = self._workspace(f"t{number}"), f.arguments[f"c{number}"]
        strip_bytes = tile.steps(plan.keys) * tile.row_bytes
        for edge, low, high in _strips(mixture.width, tile.width):
            with f.loop(low, high) as panel:
                strip = f.offset(self._workspace(f"w{number}"), f.imul(panel.i, strip_bytes))
                column = f.index(f.imul(panel.i, tile.width))
                for row, rows in self._tiles(0, count):
                    # factors are not packed: micro-kernels read each row along the keys, where it lies
                    a = f.offset(factor, f.imul(row, line))
                    micro = MicroKernel(tile.step, rows, tile.vectors, "steps")
                    # up to the last key that the tile's last row sees; the rows above have zeros there
                    keys = f.imin(reach.end(f.iadd(row, rows)), plan.keys)
                    depth = self._steps(tile, keys)
                    self._multiply(micro, (a, line), (strip, tile.row_bytes), depth, (sums, tile.row_bytes))
                    at = f.index(f.iadd(reach.first, row))
                    finish.call(f, sums, rows, at, column, batch, [c], edge=edge)

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
        # The factor is A transposed: a tile of keys is adjacent in each query's row, which is a step of the
        # sum.  The last tile may go beyond the last key that is seen: the factor has zeros there, and the
        # sums have padded rows.
        with f.loop(0, reach.seen(count), tile.rows) as key:
            # queries before it see none of these keys: steps of zeros; even, as bf16 steps are two queries
            low = reach.first_row(key.i, 2)
            if tile.step == "bf16x2":
                # pairs of queries lie in different rows, and must be packed into one lane
                a, stride = self._workspace(f"x{number}"), tile.rows * 4
                at = f.iadd(f.imul(low, line), key.i)
                pack = Pack("bf16", tile.step, tile.rows, "lanes")
                source = f.offset(factor, f.imul(at, 2))
                self._pack(pack, source, 2, line * 2, f.isub(count, low), tile.rows, a)
            else:
                a = f.offset(factor, f.imul(f.iadd(f.imul(low, line), key.i), 4))
                stride = line * 4
            skipped = self._steps(tile, low)
            with f.loop(0, tiling.panels(tile, mixture.width)) as panel:
                at = f.iadd(f.imul(panel.i, steps), skipped)
                strip = f.offset(self._workspace(f"w{number}"), f.imul(at, tile.row_bytes))
                at = f.iadd(f.imul(panel.i, tiling.padded_rows), key.i)
                sums = f.offset(self._workspace(f"t{number}"), f.imul(at, tile.row_bytes))
                depth, b = f.isub(steps, skipped), (strip, tile.row_bytes)
                self._multiply(micro, (a, stride), b, depth, (sums, tile.row_bytes), accumulate=1)


def _strips(columns: int, width: int) -> list[tuple[bool, int, int]]:
    """Whole strips, from and to, and the strip at the edge; each only if there is one."""
    whole = columns // width
    ranges = [(False, 0, whole), (True, whole, -(-columns // width))]
    return [(edge, low, high) for edge, low, high in ranges if low < high]
