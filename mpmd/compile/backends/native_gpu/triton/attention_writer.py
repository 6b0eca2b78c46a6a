"""What both kernels of attention are printed from, and write: products of tiles, values of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator

from mpmd.compile.backends.native_gpu.triton.conversions import HALF, MEMORY
from mpmd.compile.backends.native_gpu.triton.matrices import MatrixOperand, MatrixWriter, pieces_of
from mpmd.compile.backends.native_gpu.triton.online import RowIteration
from mpmd.compile.backends.native_gpu.triton.tiling import PlanTiling
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel
from mpmd.compile.kernels.kernel_plan import ELEMENT, ROW, Apply, KernelPlan, Load, ReduceNode, Store
from mpmd.compile.kernels.masking import Guard, Triangle
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.kernels.picking import decided
from mpmd.compile.kernels.product_plans import KEYS, QUERIES, AttentionPlan, Mixture, Scores


@dataclasses.dataclass(frozen=True)
class AttentionBlocks:
    """Sizes of a kernel's tiles: `outer` positions of a program, `inner` of an iteration, and its stages."""

    outer: int
    inner: int
    warps: int
    stages: int


KernelSizes = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of the first and of the second kernel's tiles, see `AttentionBlocks`; none: by rules."""


@dataclasses.dataclass(frozen=True)
class PrintedAttention:
    """An attention plan with its rows as kernels compute them.

    Attributes:
        plan: the attention plan.
        rows: its rows.
        after: operand of a factor → the operand, in the plan only, of what its mixtures are multiplied by.
        passes: the iterations before the last.
        triangle: the scores that can be left out.
        sizes: of the tiles of both kernels; by rules if none are given.
    """

    plan: AttentionPlan
    rows: KernelPlan
    after: dict[int, int]
    passes: tuple[RowIteration, ...]
    triangle: Triangle | None
    sizes: KernelSizes = ((), ())

    @functools.cached_property
    def row_values(self) -> tuple[int, ...]:
        """Values of a row that the kernel of queries leaves for the kernel of keys: its factors need them."""
        rows, needed = self.rows, set[int]()
        waiting = [self.factor(m.factor) for _, m in self.mixtures(QUERIES)]
        # From the factors backwards, through elements, down to the first values of a row: those are kept.
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                if rows.levels[number] == ELEMENT:
                    waiting += rows.uses[number]
        computed = [
            k for k in needed if rows.levels[k] == ROW and isinstance(rows.nodes[k], Apply | ReduceNode)
        ]
        return tuple(sorted(k for k in computed if rows.rank - 2 in rows.depends[k]))

    @property
    def guards(self) -> tuple[Guard, ...]:
        return self.triangle.guards if self.triangle is not None else ()

    @functools.cached_property
    def seen(self) -> dict[int, bool]:
        """Conditions that hold where no key is left out."""
        masks = self.triangle.masks if self.triangle is not None else {}
        return decided(self.rows, {mask: not value for mask, value in masks.items()})

    @property
    def numbers(self) -> dict[str, int]:
        """Names of views, `row` values, and `flags` → numbers of arguments after the rows'."""
        names = [*self.plan.views, *(f"row{k}" for k in self.row_values), "flags"]
        return {name: len(self.rows.operands) + k for k, name in enumerate(names)}

    @property
    def virtual(self) -> frozenset[int]:
        """Operands of the rows that are not in memory."""
        return self.plan.inner | frozenset(self.after.values())

    def mixtures(self, over: str) -> list[tuple[int, Mixture]]:
        return [(k, m) for k, m in enumerate(self.plan.mixtures) if m.over == over]

    def factor(self, operand: int) -> int:
        """The node that a factor's or a row factor's operand holds."""
        return next(s.node for s in self.rows.stores if s.operand == operand)

    @property
    def kept(self) -> list[Store]:
        return [s for s in self.rows.stores if s.operand not in self.virtual]

    @property
    def first_scratch(self) -> int:
        """The number of the first scratch array."""
        return len(self.rows.operands) + len(self.plan.views)

    @property
    def scratch(self) -> list[tuple[str, int]]:
        """Dtype and size of the scratch arrays: values of each row, a flag for each block."""
        size = math.prod(self.plan.batch) * self.plan.queries
        return [*((stored(self.rows.nodes[k].dtype), size) for k in self.row_values), ("s32", size)]


def stored(dtype: str) -> str:
    """The type in which a value of a row is left for the other kernel."""
    return "f32" if dtype in HALF else dtype


@dataclasses.dataclass(frozen=True)
class TilePart:
    """Tiles of an inner loop.

    Attributes:
        first: number of the first tile.
        end: the first position that is in none.
        times: how many there are, on average.
        exists: all positions of these tiles exist.
        seen: all queries of the program see all of their keys, or the other way round.
        counted: what they multiply counts as the loop's.
    """

    first: str
    end: str
    times: float
    exists: bool = True
    seen: bool = False
    counted: bool = False


class AttentionWriter(MatrixWriter):
    """Writes a kernel of attention.

    Args:
        this: the attention.
        tiling: of the tiles of scores.
        blocks: sizes.
    """

    def __init__(self, this: PrintedAttention, tiling: PlanTiling, blocks: AttentionBlocks) -> None:
        super().__init__(tiling, {this.numbers[name]: _matrix(this.plan, name) for name in this.plan.views})
        self.this, self.blocks = this, blocks
        self._counted, self._mask_down = False, ""
        self._tiles: dict[tuple[object, ...], list[str]] = {}

    def needed(self, numbers: Iterable[int]) -> set[int]:
        """The nodes that must be computed for some."""
        nodes, waiting = set[int](), list(numbers)
        while waiting:
            number = waiting.pop()
            if number not in nodes and not self.is_known(number):
                nodes.add(number)
                node = self.plan.nodes[number]
                # Where a mask is known, the branch that it leaves out needs no scores.
                if isinstance(node, Apply) and node.op == "select" and node.args[0] in self.decided:
                    waiting.append(node.args[1 if self.decided[node.args[0]] else 2])
                elif not isinstance(node, ReduceNode):
                    waiting += self.plan.uses[number]
        return nodes

    @contextlib.contextmanager
    def inner_tiles(self, part: TilePart) -> Iterator[None]:
        self._counted, self._tiles = part.counted, {}
        with self.column_tiles(part.first, part.end, part.times, self.blocks.stages, whole=part.exists):
            self.line(f"t = c0 + tl.arange(0, {self.blocks.inner})[:, None]")
            self._mask_down = f"(t < {self.tiling.column_steps.points})" if self.masks[1] else ""
            self.decided = self.this.seen if part.seen else {}
            yield
            self.decided = {}

    def _tile(self, name: str, width: int) -> list[str]:
        """The tiles of a factor at the inner positions `[positions, width]`; each is loaded once."""
        matrix, turned = self.matrices[self.this.numbers[name]], name[0] == "b"
        view = matrix.view
        steps = (view.column, view.row) if turned else (view.row, view.column)
        # Factors that are the same array, seen the same way, are one tile.
        key = (self.this.plan.array_of(name), view.dtype, view.offset, view.batch, *steps, width)
        if key not in self._tiles:
            self._tiles[key] = []
            for at, (first, size, padded) in enumerate(pieces_of(width)):
                along = f"({first} + tl.arange(0, {size})[None, :])"
                masks = [self._mask_down, f"({along} < {width})" if padded else ""]
                operand = self.this.numbers[name]
                self.factor(f"{name}_{at}", operand, ("t", along), masks, turned=turned)
                self._tiles[key].append(f"{name}_{at}")
        return self._tiles[key]

    def scores(self, needed: Collection[int], swapped: bool) -> None:
        for k, score in enumerate(self.this.plan.scores):
            loads = [n for n in needed if is_load_of(self.plan, n, score.sums)]
            if not loads:
                continue
            left, right = (score.b, score.a) if swapped else (score.a, score.b)
            own, other = ("b", "a") if swapped else ("a", "b")
            tiles = self._tile(f"{other}{k}", score.depth)
            # Wide factors are in pieces of powers of two along the depth, whose products add up.
            pairs = [(f"{own}{k}_{at}", f"tl.trans({tile})") for at, tile in enumerate(tiles)]
            self.dot(f"s{k}", pairs, (left.dtype, right.dtype))
            for number in loads:
                self.define(number, f"s{k}")
            self._count(score.depth)

    def own_factors(self, scores: Iterable[tuple[int, Scores]], swapped: bool) -> None:
        for k, score in scores:
            name = "b" if swapped else "a"
            for at, (first, size, padded) in enumerate(pieces_of(score.depth)):
                along = f"({first} + tl.arange(0, {size})[None, :])"
                masks = [self.masks[0], f"({along} < {score.depth})" if padded else ""]
                operand = self.this.numbers[f"{name}{k}"]
                self.factor(f"{name}{k}_{at}", operand, ("r", along), masks, turned=swapped)

    def mixture_sums(self, mixtures: Iterable[tuple[int, Mixture]]) -> None:
        for k, mixture in mixtures:
            for at, (_, size, _) in enumerate(pieces_of(mixture.width)):
                self.line(f"m{k}_{at} = tl.full([{self.blocks.outer}, {size}], 0.0, tl.float32)")

    def mix(self, mixtures: Iterable[tuple[int, Mixture]]) -> None:
        for k, mixture in mixtures:
            number = self.this.factor(mixture.factor)
            shape = [self.tiling.height, self.tiling.width]
            tile = f"tl.broadcast_to({self.value(number)}, {shape})"
            # Positions past the end have scores of zeros, whose exponentials are not zero.
            if self.masks[1]:
                tile = f"tl.where({self.masks[1]}, {tile}, 0.0)"
            dtype = self.plan.nodes[number].dtype
            self.line(f"x{k} = {tile}.to(tl.{MEMORY[dtype]})")
            for at, name in enumerate(self._tile(f"w{k}", mixture.width)):
                self.dot(f"m{k}_{at}", [(f"x{k}", name)], (dtype, mixture.w.dtype), f"m{k}_{at}")
            self._count(mixture.width)

    def store_mixtures(self, mixtures: Iterable[tuple[int, Mixture]]) -> None:
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

    def row_values(self) -> Iterator[tuple[int, str, str]]:
        """What one kernel leaves for the other: nodes, their arrays' dtype, and where values of a row are."""
        image = f"b * {self.this.plan.queries} + " if self.this.plan.batch else ""
        for number in self.this.row_values:
            place = f"p{self.this.numbers[f'row{number}']} + {image}"
            yield number, stored(self.plan.nodes[number].dtype), place

    def _count(self, width: int) -> None:
        if not self._counted:
            return
        # Counted once for all parts of the loop: every point, times the share that the mask leaves.
        share = 1.0 if self.this.triangle is None else self.this.plan.share
        self.flops += 2.0 * math.prod(self.this.rows.extents) * width * share

    def finished(self, grid: int) -> PrintedKernel:
        this, first = self.this, self.this.first_scratch
        arrays = enumerate(this.scratch, first)
        scratch = {k: (dtype, DTYPE_BYTES[dtype] * count) for k, (dtype, count) in arrays}
        factors = this.plan.scores[0].a.dtype
        return self.printed("attention", scratch, grid, self.blocks.warps, factors)


def is_load_of(plan: KernelPlan, number: int, operand: int) -> bool:
    """Whether a node is an element of an operand."""
    node = plan.nodes[number]
    return isinstance(node, Load) and node.operand == operand


def _matrix(plan: AttentionPlan, name: str) -> MatrixOperand:
    kind, k = name[0], int(name[1:])
    if kind in "ab":
        depth = plan.scores[k].depth
        rows, columns = (plan.queries, depth) if kind == "a" else (depth, plan.keys)
    else:
        mixture = plan.mixtures[k]
        summed, kept = (plan.keys, plan.queries) if mixture.over == KEYS else (plan.queries, plan.keys)
        rows, columns = (summed if kind == "w" else kept), mixture.width
    return MatrixOperand(plan.views[name], tuple(plan.batch), rows, columns)
