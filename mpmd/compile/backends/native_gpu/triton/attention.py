"""From an attention plan to its Triton kernels; scores and factors are tiles that never leave a program.

    queries   a block of queries iterates over keys: reductions of rows, mixtures over keys, other results
    keys      a block of keys iterates over queries: mixtures over queries; it reads each row's reductions

A tile of scores is `[queries, keys]` in the first kernel and `[keys, queries]` in the second, so that what
it multiplies next is its left factor in both.  Blocks after a causal mask are left out, those before it have
no mask; where a row does not meet the conditions for that, its program goes over all keys, and leaves a flag
for the second kernel.  What factors need of a row is computed by the first kernel and kept for the second.

Source: FlashAttention (Dao et al. 2022) for the iteration over blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from mpmd.compile.backends.native_gpu.triton.accumulators import RowAccumulators
from mpmd.compile.backends.native_gpu.triton.attention_writer import (
    AttentionBlocks,
    AttentionWriter,
    KernelSizes,
    PrintedAttention,
    TilePart,
    is_load_of,
)
from mpmd.compile.backends.native_gpu.triton.conversions import from_memory, literal, to_memory
from mpmd.compile.backends.native_gpu.triton.emit import unsupported
from mpmd.compile.backends.native_gpu.triton.matrices import MIN_SIDE, pieces_of
from mpmd.compile.backends.native_gpu.triton.online import RowIteration, RowReductions, factored, tiles_seen
from mpmd.compile.backends.native_gpu.triton.tiling import PlanTiling, power_of_two
from mpmd.compile.backends.native_gpu.triton.triton_kernels import (
    ALIGNMENT,
    PlanKernels,
    PrintedKernel,
    hoist,
)
from mpmd.compile.kernels.kernel_plan import ELEMENT, ROW, store_arguments, store_level
from mpmd.compile.kernels.masking import Triangle, triangle_of
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.kernels.precision import without_narrow_sums
from mpmd.compile.kernels.product_plans import KEYS, QUERIES, AttentionPlan
from mpmd.errors import CompileError

_WIDEST = 256
"""Columns of the widest factor."""


def refusal(plan: AttentionPlan) -> str:
    """Why there is no kernel for a plan, or ""."""
    widths = [s.depth for s in plan.scores] + [m.width for m in plan.mixtures]
    if max(widths) > _WIDEST:
        return f"a program does not hold a factor of {max(widths)} columns"
    rows = plan.rows
    if rows.kind not in ("row", "loop") or rows.row_dims != 1:
        return "no attention kernel adds up queries"
    if any(s.combine or s.where >= 0 for s in rows.stores):
        return "attention kernels write whole results"
    return unsupported(rows)


@functools.lru_cache(maxsize=512)
def attention_kernels(plan: AttentionPlan, sizes: KernelSizes = ((), ())) -> PlanKernels:
    """The kernels of a plan: their operands are the rows' operands, then its views, then scratch arrays.

    Args:
        plan: the plan.
        sizes: of the tiles; by rules if none are given.

    Raises:
        CompileError: there is no kernel for it.
    """
    reason = refusal(plan)
    if reason:
        raise CompileError(reason)
    this = dataclasses.replace(_described(plan), sizes=sizes)
    # The kernel of queries also runs for the row values and flags that the kernel of keys reads.
    kernels = []
    if this.mixtures(KEYS) or this.kept or this.row_values or this.guards:
        kernels.append(_QueryKernel(this).kernel())
    if this.mixtures(QUERIES):
        kernels.append(_KeyKernel(this).kernel())
    scratch = [DTYPE_BYTES[dtype] * count for dtype, count in this.scratch]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in scratch]
    return PlanKernels(tuple(kernels), tuple(sum(padded[:k]) for k in range(len(padded))), sum(padded))


def argument_names(plan: AttentionPlan) -> dict[int, str]:
    """Number of a kernel's operand → the name of the array; scratch arrays are left out."""
    this = _described(plan)
    outer = {k: f"p{k}" for k in range(len(plan.rows.operands))}
    return outer | {n: name for name, n in this.numbers.items() if name in plan.views}


@functools.lru_cache(maxsize=512)
def _described(plan: AttentionPlan) -> PrintedAttention:
    queries = {m.factor for m in plan.mixtures if m.over == QUERIES}
    factors = frozenset(m.factor for m in plan.mixtures)
    # Only factors that are mixed over keys alone lose their factors of a row: a mixture over queries sums
    # over the rows, whose factors differ.
    rows = factored(without_narrow_sums(plan.rows, factors), factors - queries)
    triangle = triangle_of(rows.plan, factors)
    # Results over queries and keys need their masked elements: then no key is left out.
    wide = any(s.operand not in plan.inner and store_level(rows.plan, s) == ELEMENT for s in rows.plan.stores
               if s.operand not in rows.after.values())  # fmt: skip
    reductions = RowReductions(rows.plan)
    passes = tuple(reductions.passes())
    if triangle is not None and triangle.guards:  # conditions on results of the first iteration
        first = passes[0].reductions if passes else ()
        # Guards are checked after the first pass, and must not need a reduction of a later one.
        wide |= any(reductions.needs[g.value] - set(first) for g in triangle.guards)
    return PrintedAttention(plan, rows.plan, rows.after, passes, None if wide else triangle)


def first_scratch(plan: AttentionPlan) -> int:
    """The number of the first scratch array."""
    return _described(plan).first_scratch


def _blocks(this: PrintedAttention, over: str) -> AttentionBlocks:
    """Sizes that do not spill; four warps for 64 rows, as they multiply; two programs of a gradient."""
    if given := this.sizes[over == QUERIES]:
        return AttentionBlocks(*given)
    plan, gradient = this.plan, len(this.plan.scores) > 1
    dtypes = {v.dtype for v in plan.views.values()}
    width = max([s.depth for s in plan.scores] + [m.width for m in plan.mixtures])
    # All tiles of a program grow with the widest factor.
    wide = max(width, 64)
    if "f32" in dtypes:
        outer, inner, warps = (32, 32, 4) if wide <= 128 else (16, 16, 4)
    elif wide <= 128:
        outer, inner, warps = (64, 32, 4) if gradient else (128, 64, 8)
    else:
        outer, inner, warps = (32, 32, 8) if gradient else (64, 32, 8)  # of 163 KiB on an A100
    return AttentionBlocks(outer, inner, warps, 2 if gradient and wide > 64 else 3)


def _fitting(blocks: AttentionBlocks, outer: int, inner: int) -> AttentionBlocks:
    sides = [
        min(b, max(MIN_SIDE, power_of_two(n))) for b, n in ((blocks.outer, outer), (blocks.inner, inner))
    ]
    return dataclasses.replace(blocks, outer=sides[0], inner=sides[1])


class _BlockKernel:
    """A program for each block of queries or of keys, which goes over blocks of the others."""

    def __init__(self, this: PrintedAttention, over: str) -> None:
        rank, queries, keys = this.rows.rank, this.plan.queries, this.plan.keys
        outer, inner = (queries, keys) if over == KEYS else (keys, queries)
        rows, columns = (rank - 2, rank - 1) if over == KEYS else (rank - 1, rank - 2)
        self.this, self.blocks = this, _fitting(_blocks(this, over), outer, inner)
        dims, sides = (tuple(range(rank - 2)), (rows,), (columns,)), (self.blocks.outer, self.blocks.inner)
        self.write = AttentionWriter(this, PlanTiling(this.rows, *dims, *sides, looped=True), self.blocks)
        self.mixtures = this.mixtures(over)
        self.block_count = -(-outer // self.blocks.outer)

    def begin(self, block: str) -> None:
        write = self.write
        wide = ".to(tl.int64)" if write.tiling.index_type == "int64" else ""
        write.line(f"pid = tl.program_id(0){wide}")
        write.line(f"block = {block}")
        write.batch(f"pid // {self.block_count}")
        write.rows("block")

    def finished(self) -> PrintedKernel:
        return self.write.finished(self.block_count * math.prod(self.this.plan.batch))


class _QueryKernel(_BlockKernel):
    def __init__(self, this: PrintedAttention) -> None:
        super().__init__(this, KEYS)
        self.keys, self.end = this.plan.keys, str(this.plan.keys)

    def kernel(self) -> PrintedKernel:
        write, this = self.write, self.this
        # the last blocks have the most keys: they go first
        self.begin(f"{self.block_count - 1} - pid % {self.block_count}")
        # Online: the pass that finds the maximum also mixes, and rescales the mixtures as it grows.
        # Otherwise reductions come first, and one more pass over keys mixes.
        merged = self._merges_last()
        if this.passes or self._goes_over_keys():
            write.own_factors(enumerate(this.plan.scores), swapped=False)
            write.mixture_sums(self.mixtures)
        if this.triangle is not None:
            offset, first = this.triangle.offset, f"block * {self.blocks.outer}"
            # Keys that all rows of the block see, in whole tiles, need no mask; then come tiles up to the
            # last key that its last row sees.
            whole = f"tl.minimum(tl.maximum({first} + {offset + 1}, 0), {self.keys})"
            write.line(f"whole = {whole} // {self.blocks.inner}")
            write.line(
                f"end = tl.minimum(tl.maximum({first} + {self.blocks.outer + offset}, 0), {self.keys})"
            )
            self.end = "end"
        # Without passes the guards need no reduction: they are known before the only loop, which can take
        # the end that they give.
        if this.guards and not this.passes:
            self._check_guards()
        for k, each in enumerate(this.passes):
            self._reductions(each, guarded=bool(this.guards) and k == 0, mixes=merged)
        if not merged:
            self._last()
        self._results()
        return self.finished()

    def _parts(self) -> Iterator[TilePart]:
        steps, triangle = self.write.tiling.column_steps, self.this.triangle
        offset = triangle.offset if triangle is not None else None
        whole, others = tiles_seen(self.write.tiling.row_steps, steps, offset, keys=True)
        if triangle is not None:
            yield TilePart("0", f"whole * {steps.side}", whole, seen=True, counted=True)
            yield TilePart("whole", self.end, others, exists=steps.fill)
            return
        full = steps.points // steps.side
        if full:
            yield TilePart("0", str(full * steps.side), whole, counted=True)
        if others:
            yield TilePart(str(full), self.end, others, exists=False, counted=not full)

    def _merges_last(self) -> bool:
        """Whether the mixtures are made in the only pass, relative to its maximum."""
        this = self.this
        if len(this.passes) != 1 or this.passes[0].top < 0 or not self.mixtures:
            return False
        if any(store_level(this.rows, s) == ELEMENT for s in this.kept):
            return False
        # Each factor must be relative to the pass's maximum as its sums are, and need no reduction but
        # that.
        top, shift, reductions = this.passes[0].top, this.passes[0].shift, RowReductions(this.rows)
        numbers = [this.factor(m.factor) for _, m in self.mixtures]
        return all(reductions.shift_of(n, top) == shift and reductions.needs[n] <= {top} for n in numbers)

    def _reductions(self, each: RowIteration, *, guarded: bool, mixes: bool) -> None:
        sums = RowAccumulators(self.write, each)
        hoist(self.write, self._wanted(each, mixes), [self.this.rows.rank - 1], each.reductions)
        sums.begin()
        for part in self._parts():
            self._keys(sums, part, mixes)
        if guarded:
            sums.define()
            begin = f"(({self.end} + {self.blocks.inner - 1}) // {self.blocks.inner})"
            self._check_guards()
            exists = self.write.tiling.column_steps.fill
            # A row that does not meet the guards counts masked keys, too: the iteration goes on where it
            # stopped, to the new end. For most blocks that is the old one, and no tile is left.
            self._keys(sums, TilePart(begin, self.end, 0.0, exists=exists), mixes)
        sums.finish(list(self._sums_of_mixtures()) if mixes else [])

    def _check_guards(self) -> None:
        """Goes over all keys if a row of the block does not meet the conditions for leaving out some."""
        write, broken = self.write, []
        for guard in self.this.guards:
            value = write.value(guard.value)
            filler, bound = (literal(number, "f32") for number in (guard.filler, guard.bound))
            difference = f"{filler} {'+' if guard.negated else '-'} {value}"
            broken.append(f"(1 - ({difference} < {bound}).to(tl.int32))")
        write.line(f"broken = tl.broadcast_to({' | '.join(broken)}, [{self.blocks.outer}, 1])")
        # rows past the last query hold garbage, which must not lengthen the loop
        if write.masks[0]:
            write.line(f"broken = tl.where({write.masks[0]}, broken, 0)")
        write.line("broken = tl.reduce(tl.reduce(broken, 1, bitwise_or), 0, bitwise_or)")
        write.line(f"last = tl.where(broken > 0, {self.keys}, {self.end})")
        self.end = "last"

    def _keys(self, sums: RowAccumulators, part: TilePart, mixes: bool) -> None:
        write, each = self.write, sums.each
        write.forget(each.reductions)
        with write.inner_tiles(part):
            write.scores(write.needed(self._wanted(each, mixes)), swapped=False)
            sums.add_tile(list(self._sums_of_mixtures()) if mixes else [])
            if mixes:
                write.mix(self.mixtures)

    def _wanted(self, each: RowIteration, mixes: bool) -> list[int]:
        wanted = [self.this.rows.uses[n][0] for n in each.reductions]
        return wanted + [self.this.factor(m.factor) for _, m in self.mixtures if mixes]

    def _sums_of_mixtures(self) -> Iterator[str]:
        for k, mixture in self.mixtures:
            for at in range(len(pieces_of(mixture.width))):
                yield f"m{k}_{at}"

    def _goes_over_keys(self) -> bool:
        return bool(self.mixtures) or any(store_level(self.this.rows, s) == ELEMENT for s in self.this.kept)

    def _last(self) -> None:
        write, this = self.write, self.this
        wide = [s for s in this.kept if store_level(this.rows, s) == ELEMENT]
        if not wide and not self.mixtures:
            return
        wanted = [n for s in wide for n in store_arguments(s)]
        wanted += [this.factor(m.factor) for _, m in self.mixtures]
        hoist(write, wanted, [this.rows.rank - 1])
        for part in self._parts():
            with write.inner_tiles(part):
                write.scores(write.needed(wanted), swapped=False)
                write.prepare(wide)
                write.mix(self.mixtures)
                write.stores(wide)

    def _results(self) -> None:
        write, this = self.write, self.this
        write.stores([s for s in this.kept if store_level(this.rows, s) == ROW])
        write.store_mixtures(self.mixtures)
        mask = f", mask={write.masks[0]}" if write.masks[0] else ""
        for number, dtype, place in write.row_values():
            write.writes.add(this.numbers[f"row{number}"])
            write.line(f"tl.store({place}r, {to_memory(write.value(number), dtype)}{mask})")
        if this.guards and this.mixtures(QUERIES):
            operand = this.numbers["flags"]
            write.writes.add(operand)
            write.line(f"tl.store(p{operand} + pid, broken)")


class _KeyKernel(_BlockKernel):
    def __init__(self, this: PrintedAttention) -> None:
        super().__init__(this, QUERIES)

    def kernel(self) -> PrintedKernel:
        write, this = self.write, self.this
        self.begin(f"pid % {self.block_count}")
        # The loop runs over queries for a block of keys, so that sums over queries stay in registers: no
        # atomic additions, and results that do not depend on an order.
        factors = [this.factor(m.factor) for _, m in self.mixtures]
        wanted = write.needed(factors)
        used = [(k, s) for k, s in enumerate(this.plan.scores)
                if any(is_load_of(this.rows, n, s.sums) for n in wanted)]  # fmt: skip
        write.own_factors(used, swapped=True)
        write.mixture_sums(self.mixtures)
        # Row values are loaded anew for each tile of queries; scores are computed again, as tiles of them
        # never leave a program.
        for part in self._parts():
            with write.inner_tiles(part):
                self._row_values()
                write.scores(write.needed(factors), swapped=True)
                write.mix(self.mixtures)
        write.store_mixtures(self.mixtures)
        return self.finished()

    def _parts(self) -> Iterator[TilePart]:
        """The queries that see keys of the block: first those that see some of them."""
        steps, triangle = self.write.tiling.column_steps, self.this.triangle
        offset = triangle.offset if triangle is not None else None
        whole, others = tiles_seen(self.write.tiling.row_steps, steps, offset, keys=False)
        full, begin = steps.points // steps.side, "0"
        rest = 0 if steps.fill else 1
        if triangle is not None:
            begin = "whole"
            self._first(triangle, full)
            yield TilePart("first", f"whole * {steps.side}", max(0.0, others - rest))
        if full:
            end = str(full * steps.side)
            yield TilePart(begin, end, whole, seen=triangle is not None, counted=True)
        if rest:
            yield TilePart(self._rest(full), str(steps.points), 1.0, exists=False, counted=not full)

    def _rest(self, full: int) -> str:
        """The number of the last tile, which is not whole; later ones if none of its queries sees a key."""
        return f"tl.maximum(first, {full})" if self.this.triangle is not None else str(full)

    def _first(self, triangle: Triangle, full: int) -> None:
        """The first query that sees a key of the block, or 0 if a row before sees all."""
        write, outer, inner = self.write, self.blocks.outer, self.blocks.inner
        # The first tile with a query that sees the block's first key, and the first whose queries all see
        # its last.
        write.line(f"first = tl.maximum(block * {outer} - {triangle.offset}, 0) // {inner}")
        last = f"tl.maximum(block * {outer} + {outer - 1 - triangle.offset}, 0)"
        write.line(f"whole = tl.minimum(({last} + {inner - 1}) // {inner}, {full})")
        if triangle.guards:
            rows = _fitting(_blocks(self.this, KEYS), self.this.plan.queries, self.this.plan.keys).outer
            count = -(-self.this.plan.queries // rows)
            operand = self.this.numbers["flags"]
            write.reads.add(operand)
            write.line(f"f = tl.arange(0, {power_of_two(count)})")
            # blocks of queries are numbered from the last one
            place = f"p{operand} + pid // {self.block_count} * {count} + {count - 1} - f"
            before = f"(f * {rows} < first * {inner})"
            # Any block of queries before `first` that went over all keys: then its queries count here, and
            # the loop starts at 0 with masks.
            write.line(f"flags = tl.load({place}, mask=(f < {count}) & {before}, other=0)")
            write.line("first = tl.where(tl.reduce(flags, 0, bitwise_or) > 0, 0, first)")

    def _row_values(self) -> None:
        write = self.write
        rest = f", mask={write.masks[1]}, other=0" if write.masks[1] else ""
        for number, dtype, place in write.row_values():
            write.reads.add(self.this.numbers[f"row{number}"])
            write.define(number, from_memory(f"tl.load({place}c{rest})", dtype))
