"""From a product with an epilogue to one Triton kernel: each program sums a tile, and computes what follows.

The sums of a tile are a value of the epilogue's plan, in registers.  Programs that run at the same time work
on neighbouring tiles, which read the same rows and columns of the factors.

Products with few rows for each of many batch indices become products with many rows:

    8 x 4096 times [4, 128] · [128, 4096]   ->   8 x 4 times [4096, 128] · [128, 4096]

Heads that share their keys are such products: the rows of their scores are the queries and the heads of a
group, which are not one dim in memory.  A tile of sums has 16 rows at least, and reads a whole right factor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from mpmd.compile.backends.native_gpu.triton.emit import unsupported
from mpmd.compile.backends.native_gpu.triton.matrices import MIN_SIDE, MatrixOperand, MatrixWriter
from mpmd.compile.backends.native_gpu.triton.tiling import PlanTiling, TileSteps, power_of_two
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PlanKernels, PrintedKernel
from mpmd.compile.kernels.index import constant, dim, linear, strides_of
from mpmd.compile.kernels.kernel_plan import IndexValue, KernelPlan, Load
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.product_plans import MatmulPlan, View


def with_long_rows(plan: MatmulPlan) -> MatmulPlan:
    """The product with other rows if it has too few: the longest batch dim that its right factor lacks."""
    shared = [d for d, step in enumerate(plan.b.batch) if not step]
    longest = max(shared, key=lambda d: plan.batch[d], default=-1)
    if plan.m >= MIN_SIDE or longest < 0 or plan.batch[longest] <= plan.m:
        return plan

    def turned(view: View) -> View:
        return dataclasses.replace(
            view, row=view.batch[longest], batch=_replaced(view.batch, longest, view.row)
        )

    return dataclasses.replace(
        plan,
        batch=_replaced(plan.batch, longest, plan.m),
        m=plan.batch[longest],
        a=turned(plan.a),
        b=dataclasses.replace(plan.b, batch=_replaced(plan.b.batch, longest, 0)),
        c=turned(plan.c),
        epilogue=None if plan.epilogue is None else _with_dims_exchanged(plan.epilogue, longest, plan.sums),
    )


def _replaced(numbers: Sequence[int], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


def _with_dims_exchanged(plan: KernelPlan, one: int, sums: int) -> KernelPlan:
    """An epilogue with a batch dim and the rows in each other's place; its sums stay dense."""
    other = plan.rank - 2
    extents = _replaced(_replaced(plan.extents, one, plan.extents[other]), other, plan.extents[one])
    moved = {one: dim(other), other: dim(one)}
    dense = linear([dim(d) for d in range(plan.rank)], strides_of(extents))
    nodes = []
    for node in plan.nodes:
        if isinstance(node, Load | IndexValue):
            index = node.index.substitute(moved, extents)
            node = dataclasses.replace(node, index=index)
        if isinstance(node, Load) and node.operand == sums:
            node = dataclasses.replace(node, index=dense)
        nodes.append(node)
    stores = [dataclasses.replace(s, index=s.index.substitute(moved, extents)) for s in plan.stores]
    return dataclasses.replace(plan, extents=extents, nodes=tuple(nodes), stores=tuple(stores))


FACTORS = ("bf16", "f16", "f32")
_NEIGHBOURS = 8
"""Tiles below each other whose programs have numbers next to each other."""
_PIECE = 64
"""Columns of a tile for which an epilogue is computed at a time: their values are in registers together."""


@dataclasses.dataclass(frozen=True)
class _ProductTile:
    """Sizes of a program's tile and of a step of its sums; steps that are loaded at once, 0 by default."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int = 0


def refusal(plan: MatmulPlan) -> str:
    """Why there is no kernel for a product, or ""."""
    if plan.a.dtype not in FACTORS or plan.b.dtype not in FACTORS:
        return f"GPUs do not multiply {plan.a.dtype} by {plan.b.dtype}"
    if not plan.m * plan.n * plan.k * math.prod(plan.batch):
        return "a product of nothing"
    epilogue = _epilogue(plan)
    if epilogue.extents != (*plan.batch, plan.m, plan.n):
        return "the epilogue is over other dims than the product"
    loads = [n for n in epilogue.nodes if isinstance(n, Load) and n.operand == _sums_of(plan)]
    dense = _dense(epilogue)
    if any((n.index, n.where) != (dense, -1) for n in loads):
        return "the epilogue reads sums of other elements"
    return unsupported(epilogue)


def _dense(plan: KernelPlan) -> object:
    return linear([dim(d) for d in range(plan.rank)], strides_of(plan.extents))


@functools.lru_cache(maxsize=2048)
def product_kernel(plan: MatmulPlan, units: int, sizes: tuple[int, ...] = ()) -> PlanKernels:
    """The kernel of a product: its operands are the epilogue's, then both factors.

    Args:
        plan: the product.
        units: processors of the device.
        sizes: see `_ProductTile`; without them the largest tile that keeps the device busy, and smaller ones
            behind it.
    """
    plan, kernel = with_long_rows(plan), None
    for tile in (_ProductTile(*sizes),) if sizes else _tiles_of(plan, units)[::-1]:
        kernel = dataclasses.replace(_with_tile(plan, tile), smaller=kernel)
    assert kernel is not None
    return PlanKernels((kernel,))


def _with_tile(plan: MatmulPlan, tile: _ProductTile) -> PrintedKernel:
    epilogue = _epilogue(plan)
    rank = epilogue.rank
    tiling = PlanTiling(
        epilogue, tuple(range(rank - 2)), (rank - 2,), (rank - 1,), tile.rows, tile.columns, looped=True
    )
    first = len(epilogue.operands)
    sides = ((plan.a, plan.m, plan.k), (plan.b, plan.k, plan.n))
    matrices = {k: MatrixOperand(view, plan.batch, *shape) for k, (view, *shape) in enumerate(sides, first)}
    write = MatrixWriter(tiling, matrices)
    below, beside = -(-plan.m // tile.rows), -(-plan.n // tile.columns)
    _place(write, below, beside)
    write.columns("column")
    _sum(write, plan, tile, first)
    sums = [k for k, n in enumerate(epilogue.nodes) if isinstance(n, Load) and n.operand == _sums_of(plan)]
    for piece in write.pieces("acc", "column", min(_PIECE, tile.columns)):
        for number in sums:
            write.define(number, piece)
        write.stores(epilogue.stores)
    write.flops = float(plan.flops)
    grid = below * beside * math.prod(plan.batch)
    return write.printed("product", {}, grid, tile.warps, plan.a.dtype)


def operands_of(plan: MatmulPlan) -> int:
    """How many operands the epilogue has; the numbers of both factors follow."""
    return len(_epilogue(plan).operands)


def _sums_of(plan: MatmulPlan) -> int:
    return plan.sums if plan.epilogue is not None else 1


@functools.lru_cache(maxsize=2048)
def _epilogue(plan: MatmulPlan) -> KernelPlan:
    """The plan's epilogue, or one that stores the sums: its operand 0 is the result, 1 the sums."""
    if plan.epilogue is not None:
        return plan.epilogue
    build = PlanBuilder(plan.name, (*plan.batch, plan.m, plan.n))
    rank, view = len(plan.batch) + 2, plan.c
    index = constant(view.offset)
    for d, step in enumerate((*view.batch, view.row, view.column)):
        index = index + dim(d) * step
    result = build.operand("", view.dtype, index.bounds(build.extents)[1] + 1)
    sums = build.operand("", "f32", math.prod(build.extents))
    build.store(result, index, build.convert(build.load_dense(sums, range(rank)), view.dtype))
    return build.finish()


def _tiles_of(plan: MatmulPlan, units: int) -> tuple[_ProductTile, ...]:
    """Tiles that keep the device busy, the largest first: it reads least from the second level.

    Which of them have registers enough, with their epilogue, is the compiler's to say.
    """
    below = math.prod(plan.batch) * -(-plan.m // 128)
    if "f32" in (plan.a.dtype, plan.b.dtype):
        sizes = [(64, 64, 32, 8)]
    elif below * -(-plan.n // 128) < units:
        sizes = [(64, 64, 64, 4)]
    else:
        wider = -(-plan.n // 256)
        widest = below * wider >= units and 2 * wider <= -(-plan.n // 128)  # no columns are added
        sizes = [*([(128, 256, 64, 8)] if widest else []), (128, 128, 64, 8), (128, 64, 64, 8)]
    fit = [max(MIN_SIDE, power_of_two(side)) for side in (plan.m, plan.n, plan.k)]
    tiles = [_ProductTile(min(m, fit[0]), min(n, fit[1]), min(k, fit[2]), w) for m, n, k, w in sizes]
    return tuple(dict.fromkeys(tiles))


def _place(write: MatrixWriter, below: int, beside: int) -> None:
    """The tile of the program: groups of rows, and columns of each."""
    wide = ".to(tl.int64)" if write.tiling.index_type == "int64" else ""
    write.line(f"pid = tl.program_id(0){wide}")
    write.batch(f"pid // {below * beside}")
    write.line(f"tile = pid % {below * beside}")
    group = _NEIGHBOURS * beside
    write.line(f"first = tile // {group} * {_NEIGHBOURS}")
    write.line(f"high = tl.minimum({below} - first, {_NEIGHBOURS})")
    write.line(f"row = first + tile % {group} % high")
    write.line(f"column = tile % {group} // high")
    write.rows("row")


def _sum(write: MatrixWriter, plan: MatmulPlan, tile: _ProductTile, first: int) -> None:
    """`acc` = the sums of the tile."""
    write.line(f"acc = tl.full([{tile.rows}, {tile.columns}], 0.0, tl.float32)")
    rows, columns = write.masks
    steps = TileSteps(plan.k, tile.depth)
    loop = f"range(0, {plan.k}, {tile.depth})"
    if tile.stages:
        loop = f"tl.{loop[:-1]}, num_stages={tile.stages})"
    with write.repeated(f"for k0 in {loop}:"):
        write.line(f"k = k0 + tl.arange(0, {tile.depth})")
        inside = ["" if steps.fill else f"(k[{side}] < {plan.k})" for side in ("None, :", ":, None")]
        write.factor("x", first, ("r", "k[None, :]"), [rows, inside[0]])
        write.factor("y", first + 1, ("k[:, None]", "c"), [inside[1], columns])
        write.dot("acc", [("x", "y")], (plan.a.dtype, plan.b.dtype), "acc", exact=plan.exact)
