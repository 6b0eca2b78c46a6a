"""From an attention plan to its Triton kernels; scores and factors are tiles that never leave a program.

    queries   a block of queries iterates over keys: reductions of rows, mixtures over keys, other results
    keys      a block of keys iterates over queries: mixtures over queries; it reads each row's reductions

A tile of scores is `[queries, keys]` in the first kernel and `[keys, queries]` in the second, so that what
it multiplies next is its left factor in both.  Blocks after a causal mask are left out; where a row does not
meet the conditions for that, its program goes over all keys, and leaves a flag for the second kernel.

Source: FlashAttention (Dao et al. 2022) for the iteration over blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator

from mpmd.compile.backends.native_gpu.triton.accumulators import RowAccumulators
from mpmd.compile.backends.native_gpu.triton.dtypes import HALF, MEMORY, from_memory, literal, to_memory
from mpmd.compile.backends.native_gpu.triton.emit import unsupported
from mpmd.compile.backends.native_gpu.triton.kernels import ALIGNMENT, PlanKernels, PrintedKernel
from mpmd.compile.backends.native_gpu.triton.matrices import MIN_SIDE, MatrixOperand, MatrixWriter, pieces_of
from mpmd.compile.backends.native_gpu.triton.online import RowIteration, RowReductions, factored, tiles_seen
from mpmd.compile.backends.native_gpu.triton.tiling import PlanTiling, power_of_two
from mpmd.compile.kernels.attention import KEYS, QUERIES, AttentionPlan, Mixture, Scores
from mpmd.compile.kernels.masking import Triangle, triangle_of
from mpmd.compile.kernels.nodes import ELEMENT, ROW, Load, ReduceNode, Store, store_arguments
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.kernels.plan import KernelPlan, store_level
from mpmd.errors import CompileError

_WIDEST = 256
"""Columns of the widest factor."""


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Sizes of a kernel's tiles: `outer` positions of a program, `inner` of an iteration, and its stages."""

    outer: int
    inner: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class _Attention:
    """An attention plan with its rows as kernels compute them.

    Attributes:
        plan: the attention plan.
        rows: its rows.
        after: operand of a factor → the operand, in the plan only, of what its mixtures are multiplied by.
        passes: the iterations before the last.
        triangle: the scores that can be left out.
        sizes: of the tiles of its kernels; by rules if none are given.
    """

    plan: AttentionPlan
    rows: KernelPlan
    after: dict[int, int]
    passes: tuple[RowIteration, ...]
    triangle: Triangle | None
    sizes: tuple[int, ...] = ()

    @property
    def reductions(self) -> tuple[int, ...]:
        """Numbers of all reductions."""
        return tuple(k for each in self.passes for k in each.reductions)

    @property
    def numbers(self) -> dict[str, int]:
        """Names of views, `stats` of each reduction, and `flags` → numbers of arguments after the rows'."""
        names = [*self.plan.views, *(f"stats{k}" for k in self.reductions), "flags"]
        return {name: len(self.rows.operands) + k for k, name in enumerate(names)}

    @property
    def virtual(self) -> frozenset[int]:
        """Operands of the rows that are not in memory."""
        return self.plan.inner | frozenset(self.after.values())

    def mixtures(self, over: str) -> list[tuple[int, Mixture]]:
        """The mixtures of a kind, with their numbers."""
        return [(k, m) for k, m in enumerate(self.plan.mixtures) if m.over == over]

    def factor(self, operand: int) -> int:
        """The node that a factor's or a row factor's operand holds."""
        return next(s.node for s in self.rows.stores if s.operand == operand)

    @property
    def kept(self) -> list[Store]:
        """The stores of results that are in memory."""
        return [s for s in self.rows.stores if s.operand not in self.virtual]


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
def attention_kernels(plan: AttentionPlan, sizes: tuple[int, ...] = ()) -> PlanKernels:
    """The kernels of a plan: their operands are those of the rows, then its views, then scratch arrays.

    Args:
        plan: the plan.
        sizes: see `_Blocks`; by rules if none are given.

    Raises:
        CompileError: there is no kernel for it.
    """
    reason = refusal(plan)
    if reason:
        raise CompileError(reason)
    this = dataclasses.replace(_described(plan), sizes=sizes)
    kernels = []
    if this.mixtures(KEYS) or this.kept or this.reductions:
        kernels.append(_QueryKernel(this).kernel())
    if this.mixtures(QUERIES):
        kernels.append(_KeyKernel(this).kernel())
    scratch = [DTYPE_BYTES[dtype] * count for dtype, count in _scratch(this)]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in scratch]
    return PlanKernels(tuple(kernels), tuple(sum(padded[:k]) for k in range(len(padded))), sum(padded))


def argument_names(plan: AttentionPlan) -> dict[int, str]:
    """Number of a kernel's operand → the name of the array; scratch arrays are left out."""
    this = _described(plan)
    outer = {k: f"p{k}" for k in range(len(plan.rows.operands))}
    return outer | {n: name for name, n in this.numbers.items() if name in plan.views}


def first_scratch(plan: AttentionPlan) -> int:
    """The number of the first scratch array."""
    this = _described(plan)
    return len(this.rows.operands) + len(plan.views)


@functools.lru_cache(maxsize=512)
def _described(plan: AttentionPlan) -> _Attention:
    queries = {m.factor for m in plan.mixtures if m.over == QUERIES}
    factors = frozenset(m.factor for m in plan.mixtures)
    made = factored(plan.rows, factors - queries)
    triangle = triangle_of(made.plan, factors)
    wide = any(s.operand not in plan.inner and store_level(made.plan, s) == ELEMENT for s in made.plan.stores
               if s.operand not in made.after.values())  # fmt: skip
    found = RowReductions(made.plan)
    passes = tuple(found.passes())
    if triangle is not None and triangle.guards:  # they are conditions on what the first iteration finds
        wide |= any(found.needs[g.value] - set(passes[0].reductions) for g in triangle.guards)
    return _Attention(plan, made.plan, made.after, passes, None if wide else triangle)


def _scratch(this: _Attention) -> list[tuple[str, int]]:
    """Dtype and size of the scratch arrays: a value of each row for each reduction, a flag for each block."""
    size = math.prod(this.plan.batch) * this.plan.queries
    return [*((_stored(this.rows.nodes[k].dtype), size) for k in this.reductions), ("s32", size)]


def _stored(dtype: str) -> str:
    """The type in which the value of a reduction is left for the other kernel."""
    return "f32" if dtype in HALF else dtype


def _blocks(this: _Attention, over: str) -> _Blocks:
    """Sizes that do not spill; four warps for 64 rows, as they multiply; two programs of a gradient."""
    if this.sizes:
        return _Blocks(*this.sizes)
    plan, gradient = this.plan, len(this.plan.scores) > 1
    dtypes = {v.dtype for v in plan.views.values()}
    width = max([s.depth for s in plan.scores] + [m.width for m in plan.mixtures])
    wide = max(width, 64)
    if "f32" in dtypes:
        outer, inner, warps = (32, 32, 4) if wide <= 128 else (16, 16, 4)
    elif wide <= 128:
        narrow = wide <= 64 and over == KEYS
        outer, inner, warps = (64, 64 if narrow else 32, 4) if gradient else (128, 64, 8)
    else:
        outer, inner, warps = (32, 32, 8) if gradient else (64, 32, 8)  # of 163 KiB on an A100
    positions = (plan.queries, plan.keys) if over == KEYS else (plan.keys, plan.queries)
    outer, inner = (min(b, max(MIN_SIDE, power_of_two(n))) for b, n in zip((outer, inner), positions))
    return _Blocks(outer, inner, warps, 2 if gradient and (wide <= 64) == (over == KEYS) else 3)


class _AttentionWriter(MatrixWriter):
    """Writes a kernel of attention.

    Args:
        this: the attention.
        tiling: of the tiles of scores.
        blocks: sizes.
    """

    def __init__(self, this: _Attention, tiling: PlanTiling, blocks: _Blocks) -> None:
        super().__init__(tiling, {this.numbers[name]: _matrix(this.plan, name) for name in this.plan.views})
        self.this, self.blocks = this, blocks

    def needed(self, numbers: Iterable[int]) -> set[int]:
        """The nodes that must be computed for some."""
        found, waiting = set[int](), list(numbers)
        while waiting:
            number = waiting.pop()
            if number not in found and not self.is_known(number):
                found.add(number)
                if not isinstance(self.plan.nodes[number], ReduceNode):
                    waiting += self.plan.uses[number]
        return found

    def scores(self, needed: Collection[int], swapped: bool) -> None:
        """The products of a tile that some values need."""
        for k, score in enumerate(self.this.plan.scores):
            loads = [n for n in needed if _is_load_of(self.plan, n, score.sums)]
            if not loads:
                continue
            left, right = (score.b, score.a) if swapped else (score.a, score.b)
            own, other = ("b", "a") if swapped else ("a", "b")
            operand = self.this.numbers[f"{other}{k}"]
            pairs = []
            for at, (first, size, padded) in enumerate(pieces_of(score.depth)):
                along = f"({first} + tl.arange(0, {size})[:, None])"
                masks = [f"({along} < {score.depth})" if padded else "", self.masks[1]]
                self.factor(f"{other}{k}_{at}", operand, (along, "c"), masks, turned=swapped)
                pairs.append((f"{own}{k}_{at}", f"{other}{k}_{at}"))
            self.dot(f"s{k}", pairs, (left.dtype, right.dtype))
            for number in loads:
                self.define(number, f"s{k}")
            self._count(score.depth)

    def own_factors(self, scores: Iterable[tuple[int, Scores]], swapped: bool) -> None:
        """The left factors of the products, which stay."""
        for k, score in scores:
            name = "b" if swapped else "a"
            for at, (first, size, padded) in enumerate(pieces_of(score.depth)):
                along = f"({first} + tl.arange(0, {size})[None, :])"
                masks = [self.masks[0], f"({along} < {score.depth})" if padded else ""]
                operand = self.this.numbers[f"{name}{k}"]
                self.factor(f"{name}{k}_{at}", operand, ("r", along), masks, turned=swapped)

    def mixture_sums(self, mixtures: Iterable[tuple[int, Mixture]]) -> None:
        """Accumulators of mixtures."""
        for k, mixture in mixtures:
            for at, (_, size, _) in enumerate(pieces_of(mixture.width)):
                self.line(f"m{k}_{at} = tl.full([{self.blocks.outer}, {size}], 0.0, tl.float32)")

    def mix(self, mixtures: Iterable[tuple[int, Mixture]], inner: str) -> None:
        """Adds the products of a tile of factors; `inner` is the condition that an inner position exists."""
        for k, mixture in mixtures:
            number = self.this.factor(mixture.factor)
            shape = [self.tiling.height, self.tiling.width]
            tile = f"tl.broadcast_to({self.value(number)}, {shape})"
            if self.masks[1]:
                tile = f"tl.where({self.masks[1]}, {tile}, 0.0)"
            dtype = self.plan.nodes[number].dtype
            self.line(f"x{k} = {tile}.to(tl.{MEMORY[dtype]})")
            for at, (first, size, padded) in enumerate(pieces_of(mixture.width)):
                along = f"({first} + tl.arange(0, {size})[None, :])"
                masks = [inner, f"({along} < {mixture.width})" if padded else ""]
                self.factor(f"w{k}_{at}", self.this.numbers[f"w{k}"], ("t", along), masks)
                self.dot(f"m{k}_{at}", [(f"x{k}", f"w{k}_{at}")], (dtype, mixture.w.dtype), f"m{k}_{at}")
            self._count(mixture.width)

    def store_mixtures(self, mixtures: Iterable[tuple[int, Mixture]]) -> None:
        """Writes the results of mixtures."""
        for k, mixture in mixtures:
            view, operand = mixture.c, self.this.numbers[f"c{k}"]
            self.writes.add(operand)
            after = self.this.after.get(mixture.factor)
            times = f" * {self.value(self.this.factor(after))}" if after is not None else ""
            for at, (first, size, padded) in enumerate(pieces_of(mixture.width)):
                along = f"({first} + tl.arange(0, {size})[None, :])"
                place = self.element(operand, "r", along)
                inside = [self.masks[0], f"({along} < {mixture.width})" if padded else ""]
                mask = " & ".join(filter(None, inside))
                rest = f", mask={mask}" if mask else ""
                self.line(f"tl.store({place}, (m{k}_{at}{times}).to(tl.{MEMORY[view.dtype]}){rest})")

    @contextlib.contextmanager
    def inner_tiles(self, first: str = "0", end: str = "") -> Iterator[str]:
        """A loop over inner positions, as columns and down; gives the condition that they exist."""
        steps, triangle = self.tiling.column_steps, self.this.triangle
        keys = self.tiling.rows < self.tiling.columns
        times = tiles_seen(self.tiling.row_steps, steps, triangle.offset if triangle else None, keys=keys)
        times = 0.0 if keys and first != "0" else times  # few rows need the rest
        with self.column_tiles(first, end, times, self.blocks.stages):
            self.line(f"t = c0 + tl.arange(0, {steps.side})[:, None]")
            yield "" if steps.fill else f"(t < {steps.points})"

    def _count(self, width: int) -> None:
        share = 1.0 if self.this.triangle is None else self.this.plan.share
        self.flops += 2.0 * math.prod(self.this.rows.extents) * width * share

    def finished(self, grid: int) -> PrintedKernel:
        """The kernel."""
        this, first = self.this, first_scratch(self.this.plan)
        arrays = enumerate(_scratch(this), first)
        scratch = {k: (dtype, DTYPE_BYTES[dtype] * count) for k, (dtype, count) in arrays}
        factors = this.plan.scores[0].a.dtype
        return self.printed("attention", scratch, grid, self.blocks.warps, factors)


class _QueryKernel:
    """A program for each block of queries."""

    def __init__(self, this: _Attention) -> None:
        self.this, self.blocks = this, _blocks(this, KEYS)
        rank, blocks = this.rows.rank, self.blocks
        dims = tuple(range(rank - 2)), (rank - 2,), (rank - 1,)
        tiling = PlanTiling(this.rows, *dims, blocks.outer, blocks.inner, looped=True)
        self.write = _AttentionWriter(this, tiling, blocks)
        self.mixtures = this.mixtures(KEYS)
        self.keys = this.plan.keys
        self.block_count = -(-this.plan.queries // blocks.outer)

    def kernel(self) -> PrintedKernel:
        """The kernel."""
        write, this = self.write, self.this
        wide = ".to(tl.int64)" if write.tiling.index_type == "int64" else ""
        write.line(f"pid = tl.program_id(0){wide}")
        # the last blocks have the most keys: they go first
        write.line(f"block = {self.block_count - 1} - pid % {self.block_count}")
        write.batch(f"pid // {self.block_count}")
        write.rows("block")
        write.own_factors(enumerate(this.plan.scores), swapped=False)
        write.mixture_sums(self.mixtures)
        end = str(self.keys)
        if this.triangle is not None:
            bound = f"block * {self.blocks.outer} + {self.blocks.outer + this.triangle.offset}"
            write.line(f"end = tl.minimum(tl.maximum({bound}, 0), {self.keys})")
            end = "end"
        merged = self._merges_last()
        for k, each in enumerate(this.passes):
            end = self._reductions(each, end, guarded=k == self._guarded(), mixes=merged)
        if not merged:
            self._last(end)
        self._results()
        return write.finished(self.block_count * math.prod(this.plan.batch))

    def _guarded(self) -> int:
        """The pass after which the conditions for leaving out keys are known."""
        if self.this.triangle is None or not self.this.triangle.guards:
            return -1
        return 0  # they are conditions on the maximum of the first

    def _merges_last(self) -> bool:
        """Whether the mixtures are made in the only pass, relative to its maximum."""
        this = self.this
        if len(this.passes) != 1 or this.passes[0].top < 0 or not self.mixtures:
            return False
        if any(store_level(this.rows, s) == ELEMENT for s in this.kept):
            return False
        top, shift, found = this.passes[0].top, this.passes[0].shift, RowReductions(this.rows)
        numbers = [this.factor(m.factor) for _, m in self.mixtures]
        return all(found.shift_of(n, top) == shift and found.needs[n] <= {top} for n in numbers)

    def _reductions(self, each: RowIteration, end: str, *, guarded: bool, mixes: bool) -> str:
        """An iteration over keys; returns the end of those that follow."""
        write, sums = self.write, RowAccumulators(self.write, each)
        sums.begin()
        self._keys(sums, "0", end, mixes)
        if guarded:
            sums.define()
            self._check_guards()
            write.line(f"last = tl.where(broken > 0, {self.keys}, {end})")
            begin = f"(({end} + {self.blocks.inner - 1}) // {self.blocks.inner})"
            counted = write.flops  # few rows need the rest
            self._keys(sums, begin, "last", mixes)
            write.flops, end = counted, "last"
        sums.finish(list(self._sums_of_mixtures()) if mixes else [])
        return end

    def _check_guards(self) -> None:
        """Whether a row of the block does not meet the conditions for leaving out keys."""
        write, triangle = self.write, self.this.triangle
        assert triangle is not None
        broken = []
        for guard in triangle.guards:
            value = write.value(guard.value)
            filler, bound = (literal(number, "f32") for number in (guard.filler, guard.bound))
            difference = f"{filler} {'+' if guard.negated else '-'} {value}"
            broken.append(f"(1 - ({difference} < {bound}).to(tl.int32))")
        write.line(f"broken = tl.broadcast_to({' | '.join(broken)}, [{self.blocks.outer}, 1])")
        if write.masks[0]:
            write.line(f"broken = tl.where({write.masks[0]}, broken, 0)")
        write.line("broken = tl.reduce(tl.reduce(broken, 1, bitwise_or), 0, bitwise_or)")

    def _keys(self, sums: RowAccumulators, begin: str, end: str, mixes: bool) -> None:
        write, each = self.write, sums.each
        write.forget(each.reductions)
        with write.inner_tiles(begin, end) as inner:
            wanted = [self.this.rows.uses[n][0] for n in each.reductions]
            wanted += [self.this.factor(m.factor) for _, m in self.mixtures] if mixes else []
            write.scores(write.needed(wanted), swapped=False)
            sums.add_tile(list(self._sums_of_mixtures()) if mixes else [])
            if mixes:
                write.mix(self.mixtures, inner)

    def _sums_of_mixtures(self) -> Iterator[str]:
        for k, mixture in self.mixtures:
            for at in range(len(pieces_of(mixture.width))):
                yield f"m{k}_{at}"

    def _last(self, end: str) -> None:
        """The iteration that makes factors and results."""
        write, this = self.write, self.this
        wide = [s for s in this.kept if store_level(this.rows, s) == ELEMENT]
        if not wide and not self.mixtures:
            return
        with write.inner_tiles(end=end) as inner:
            wanted = [n for s in wide for n in store_arguments(s)]
            wanted += [this.factor(m.factor) for _, m in self.mixtures]
            write.scores(write.needed(wanted), swapped=False)
            write.prepare(wide)
            write.mix(self.mixtures, inner)
            write.stores(wide)

    def _results(self) -> None:
        write, this = self.write, self.this
        write.stores([s for s in this.kept if store_level(this.rows, s) == ROW])
        write.store_mixtures(self.mixtures)
        if not this.mixtures(QUERIES):
            return
        queries = this.plan.queries
        image = f"b * {queries} + " if this.plan.batch else ""
        mask = f", mask={write.masks[0]}" if write.masks[0] else ""
        for number in this.reductions:
            operand = this.numbers[f"stats{number}"]
            write.writes.add(operand)
            value = to_memory(write.value(number), _stored(this.rows.nodes[number].dtype))
            write.line(f"tl.store(p{operand} + {image}r, {value}{mask})")
        if self._guarded() >= 0:
            operand = this.numbers["flags"]
            write.writes.add(operand)
            write.line(f"tl.store(p{operand} + pid, broken)")


class _KeyKernel:
    """A program for each block of keys."""

    def __init__(self, this: _Attention) -> None:
        self.this, self.blocks = this, _blocks(this, QUERIES)
        rank, blocks = this.rows.rank, self.blocks
        dims = tuple(range(rank - 2)), (rank - 1,), (rank - 2,)
        tiling = PlanTiling(this.rows, *dims, blocks.outer, blocks.inner, looped=True)
        self.write = _AttentionWriter(this, tiling, blocks)
        self.mixtures = this.mixtures(QUERIES)
        self.block_count = -(-this.plan.keys // blocks.outer)

    def kernel(self) -> PrintedKernel:
        """The kernel."""
        write, this = self.write, self.this
        wide = ".to(tl.int64)" if write.tiling.index_type == "int64" else ""
        write.line(f"pid = tl.program_id(0){wide}")
        write.line(f"block = pid % {self.block_count}")
        write.batch(f"pid // {self.block_count}")
        write.rows("block")
        wanted = write.needed(this.factor(m.factor) for _, m in self.mixtures)
        used = [(k, s) for k, s in enumerate(this.plan.scores)
                if any(_is_load_of(this.rows, n, s.sums) for n in wanted)]  # fmt: skip
        write.own_factors(used, swapped=True)
        write.mixture_sums(self.mixtures)
        begin = "0"
        if this.triangle is not None:
            begin = self._first(this.triangle)
        with write.inner_tiles(begin) as inner:
            self._statistics(sorted(wanted))
            write.scores(wanted, swapped=True)
            write.mix(self.mixtures, inner)
        write.store_mixtures(self.mixtures)
        return write.finished(self.block_count * math.prod(this.plan.batch))

    def _first(self, triangle: Triangle) -> str:
        """The first query that sees a key of the block, or 0 if a row before sees all."""
        write = self.write
        start = f"tl.maximum(block * {self.blocks.outer} - {triangle.offset}, 0)"
        write.line(f"first = {start} // {self.blocks.inner}")
        if triangle.guards:
            rows = _blocks(self.this, KEYS).outer
            count = -(-self.this.plan.queries // rows)
            operand = self.this.numbers["flags"]
            write.reads.add(operand)
            write.line(f"f = tl.arange(0, {power_of_two(count)})")
            # blocks of queries are numbered from the last one
            place = f"p{operand} + pid // {self.block_count} * {count} + {count - 1} - f"
            before = f"(f * {rows} < first * {self.blocks.inner})"
            write.line(f"flags = tl.load({place}, mask=(f < {count}) & {before}, other=0)")
            write.line("first = tl.where(tl.reduce(flags, 0, bitwise_or) > 0, 0, first)")
        return "first"

    def _statistics(self, wanted: Iterable[int]) -> None:
        """The reductions of the rows of this iteration, from the other kernel."""
        write, queries = self.write, self.this.plan.queries
        image = f"b * {queries} + " if self.this.plan.batch else ""
        rest = f", mask={write.masks[1]}, other=0" if write.masks[1] else ""
        for number in wanted:
            if isinstance(self.this.rows.nodes[number], ReduceNode):
                operand = self.this.numbers[f"stats{number}"]
                write.reads.add(operand)
                dtype = _stored(self.this.rows.nodes[number].dtype)
                write.define(number, from_memory(f"tl.load(p{operand} + {image}c{rest})", dtype))


def _is_load_of(plan: KernelPlan, number: int, operand: int) -> bool:
    node = plan.nodes[number]
    return isinstance(node, Load) and node.operand == operand


def _matrix(plan: AttentionPlan, name: str) -> MatrixOperand:
    """The matrices of a factor or a result."""
    kind, k = name[0], int(name[1:])
    if kind in "ab":
        depth = plan.scores[k].depth
        rows, columns = (plan.queries, depth) if kind == "a" else (depth, plan.keys)
    else:
        mixture = plan.mixtures[k]
        summed, kept = (plan.keys, plan.queries) if mixture.over == KEYS else (plan.queries, plan.keys)
        rows, columns = (summed if kind == "w" else kept), mixture.width
    return MatrixOperand(plan.views[name], tuple(plan.batch), rows, columns)
