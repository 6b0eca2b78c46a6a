"""How the iteration space of a plan is divided among programs: tiles of `height` × `width` points.

    columns   the row dims of the plan, or its last dim if it has none
    rows      the others; of a plan with sums over its outer dims, the outer ones
    batch     of such a plan, the batch dims: each index has programs of its own

Both sides are powers of two, as Triton requires; points outside of the space are masked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.kernel_plan import ROW, IndexValue, KernelPlan, Load, ReduceNode

MAX_ROW = 16384
"""Elements of a row up to which one tile holds it."""
_POINTS, _SHARED_POINTS, _SUM_POINTS, _MIXED_POINTS, _LONG = 1024, 4096, 4096, 2048, 4096
_SIDE, _MIN_SIDE = 64, 16
"""Of a tile that is transposed."""
_SUM_WIDTH, _MIN_SUM_WIDTH = 128, 16
_MAX_WARPS = 16
_MAX_NARROW = (1 << 31) - (1 << 16)
"""Positions below it are `int32`, also in tiles that reach beyond the last point."""


@dataclasses.dataclass(frozen=True)
class TileSteps:
    """Points of a line in tiles: a tile begins at a multiple of its side that is less than the points.

    Attributes:
        points: how many.
        side: of a tile.
        sharing: programs, each with tiles that follow each other; at least one.
    """

    points: int
    side: int
    sharing: int = 1

    @property
    def tiles(self) -> int:
        return -(-self.points // self.side)

    @property
    def fill(self) -> bool:
        """Whether every point of every tile exists: only then nothing needs a mask."""
        return self.points > 0 and not self.points % self.side

    @property
    def part(self) -> int:
        """Points from the first of a program to the first of the next; a multiple of the side."""
        return -(-self.tiles // self.sharing) * self.side

    @property
    def even(self) -> bool:
        """Whether all programs have equally many tiles."""
        return self.part * self.sharing == self.tiles * self.side

    def bounds(self, program: str) -> tuple[str, str]:
        """Expressions for a program's first point, and for the points from it on in which its tiles begin."""
        if self.sharing == 1:
            return "0", str(self.points)
        begin = f"{program} * {self.part}"
        return begin, str(self.part) if self.even else f"tl.minimum({self.part}, {self.points} - {begin})"


@dataclasses.dataclass(frozen=True)
class PlanTiling:
    """The tiles of one kernel.

    Attributes:
        plan: the plan.
        batch, rows, columns: its dims, each group outermost first.
        height, width: of a tile.
        chunks: programs that share the rows of one column block; 1 without sums over the outer dims.
        looped: a row is longer than a tile: programs iterate over its pieces.
        span: elements of the largest array that the plan does not list.
    """

    plan: KernelPlan
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    height: int
    width: int
    chunks: int = 1
    looped: bool = False
    span: int = 0

    def size(self, dims: Iterable[int]) -> int:
        return math.prod(self.plan.extents[d] for d in dims)

    @property
    def sums_columns(self) -> bool:
        """Whether programs add up rows."""
        return self.plan.kind in ("column", "mixed")

    @property
    def row_steps(self) -> TileSteps:
        return TileSteps(self.size(self.rows), self.height, self.chunks)

    @property
    def column_steps(self) -> TileSteps:
        return TileSteps(self.size(self.columns), self.width)

    @property
    def column_blocks(self) -> int:
        return 1 if self.looped else self.column_steps.tiles

    @property
    def row_blocks(self) -> int:
        return self.chunks if self.sums_columns else self.row_steps.tiles

    @property
    def grid(self) -> int:
        return self.size(self.batch) * self.row_blocks * max(self.column_blocks, 1)

    @property
    def warps(self) -> int:
        points, each = self.height * self.width, 256
        if self.plan.kind == "column" and self.width > _SUM_WIDTH:
            each = 1024  # threads have two sums each, which they store together
        elif self.sums_columns or (self.height > 1 and points > _POINTS):
            each = 512
        return max(1, min(_MAX_WARPS, points // each))

    @property
    def index_type(self) -> str:
        """The integers of positions: every value on the way to one fits."""
        plan = self.plan
        indices = [n.index for n in plan.nodes if isinstance(n, Load | IndexValue)]
        indices += [s.index for s in plan.stores]
        reach = max([self.span, plan.size, *(_reach(index, plan.extents) for index in indices)])
        return "int64" if reach > _MAX_NARROW else "int32"

    def shape(self, dims: Iterable[int]) -> tuple[int, int]:
        """The part of a tile that a value has that depends on some dims."""
        dims = set(dims)
        return (self.height if dims & set(self.rows) else 1, self.width if dims & set(self.columns) else 1)


def _reach(index: Index, extents: Sequence[int]) -> int:
    """The largest value of a part of an expression; positions that are data are `int64` in any case."""
    reach = abs(index.constant)
    for atom, factor in index.terms:
        if atom.kind == "dim":
            largest = max(extents[atom.number] - 1, 0)
        elif atom.inner is None:
            largest = 0
        else:
            largest = _reach(atom.inner, extents)
        reach += abs(factor) * largest
    return reach


def power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def tiling_of(plan: KernelPlan, programs: int) -> PlanTiling:
    """The tiles of a normalised plan.

    Args:
        plan: the plan.
        programs: how many keep the device busy.
    """
    if plan.kind in ("column", "mixed"):
        return _for_sums(plan, programs)
    columns = tuple(plan.row) if plan.row_dims or plan.kind == "row" else tuple(range(plan.rank))[-1:]
    rows = tuple(d for d in range(plan.rank) if d not in columns)
    tiling = PlanTiling(plan, (), rows, columns, 1, 1)
    height, width = power_of_two(tiling.size(rows)), power_of_two(tiling.size(columns))
    if plan.kind == "row" and width > MAX_ROW:
        return dataclasses.replace(tiling, width=_LONG, looped=True)
    strided = _strided_dim(plan, rows, columns)
    if strided is not None:
        rows = (*(d for d in rows if d != strided), strided)
        return dataclasses.replace(tiling, rows=rows, height=min(_SIDE, height), width=min(_SIDE, width))
    width = width if plan.kind == "row" else min(width, _POINTS)
    points = _POINTS
    if _rows_share_loads(plan, rows, columns) and plan.size >= _SHARED_POINTS * programs:
        points = _SHARED_POINTS
    return dataclasses.replace(tiling, height=min(height, max(1, points // width)), width=width)


def _rows_share_loads(plan: KernelPlan, rows: tuple[int, ...], columns: tuple[int, ...]) -> bool:
    """Whether there is an array that every row reads: the rows of a tile do so once."""
    depends = [plan.depends[k] for k, n in enumerate(plan.nodes) if isinstance(n, Load)]
    return any(dims & set(columns) and not dims & set(rows) for dims in depends)


def _for_sums(plan: KernelPlan, programs: int) -> PlanTiling:
    tiling = PlanTiling(plan, tuple(range(plan.batch_dims)), tuple(plan.outer), tuple(plan.row), 1, 1)
    height, width = (power_of_two(tiling.size(dims)) for dims in (tiling.rows, tiling.columns))
    points = _MIXED_POINTS
    if not any(isinstance(n, ReduceNode) and n.axis == ROW for n in plan.nodes):
        width, points = min(width, _SUM_WIDTH), _SUM_POINTS
    tiling = dataclasses.replace(
        tiling, height=min(height, max(1, points // width)), width=width, looped=width > MAX_ROW
    )
    tiles = tiling.row_steps.tiles
    others = max(1, tiling.column_blocks * tiling.size(tiling.batch))
    chunks = max(1, min(tiles, -(-programs // others)))
    per_chunk = max(1, -(-tiles // chunks))
    return dataclasses.replace(tiling, chunks=max(1, -(-tiles // per_chunk)))


def tiling_of_few_rows(plan: KernelPlan) -> PlanTiling:
    """The tiles of a normalised plan that adds up so few rows that one program has all of some columns."""
    tiling = _for_sums(plan, 1)
    height, width = (power_of_two(tiling.size(dims)) for dims in (tiling.rows, tiling.columns))
    height = min(height, _SUM_POINTS // _MIN_SUM_WIDTH)
    return dataclasses.replace(tiling, height=height, width=min(width, _SUM_POINTS // height), chunks=1)


def _strided_dim(plan: KernelPlan, rows: tuple[int, ...], columns: tuple[int, ...]) -> int | None:
    """A dim along which an array is contiguous that is not along the columns."""
    if plan.kind != "loop" or plan.row_dims or not columns or plan.extents[columns[0]] < _MIN_SIDE:
        return None
    last = columns[0]
    indices = [n.index for n in plan.nodes if isinstance(n, Load)] + [s.index for s in plan.stores]
    for index in indices:
        for d in rows:
            if abs(index.factor(d)) == 1 and abs(index.factor(last)) > 1 and plan.extents[d] >= _MIN_SIDE:
                return d
    return None


def resized(tiling: PlanTiling, points: int, programs: int) -> PlanTiling:
    """Tiles of about so many points, where the plan leaves a choice; `programs` keep the device busy."""
    if tiling.looped:
        return dataclasses.replace(tiling, width=points)
    height = min(power_of_two(tiling.size(tiling.rows)), max(1, points // tiling.width))
    tiling = dataclasses.replace(tiling, height=height)
    if not tiling.sums_columns:
        return tiling
    tiles = dataclasses.replace(tiling, chunks=1).row_steps.tiles
    others = max(1, tiling.column_blocks * tiling.size(tiling.batch))
    each = -(-tiles // max(1, min(tiles, -(-programs // others))))
    return dataclasses.replace(tiling, chunks=-(-tiles // each))
