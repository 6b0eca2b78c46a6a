"""Products with hardly any rows or columns, as reductions.

A tile of a matrix product has rows and whole vectors of columns.  A product of a matrix and a vector, or of a
few rows with a few columns, leaves most of it empty; there the factors are better read along their contiguous
dim, as any reduction does:

    both contiguous along k        a dot product per element of the result
    a contiguous along its rows    a column of a, times a number, added to the result: k times
"""

from __future__ import annotations

from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.index import Index, constant, dim
from mpmd.compile.kernels.matmul import MatmulPlan, View
from mpmd.compile.kernels.plan import Apply, Constant, IndexValue, KernelPlan, Load
from mpmd.compile.thunks.thunk import KernelThunk, MatmulThunk

_FEW = 4  # rows or columns for which dot products beat tiles
_LONG = 32  # a dot product that is worth its final sum over the lanes


def as_reduction(thunk: MatmulThunk) -> KernelThunk | None:
    """The same product as a reduction, or None where tiles are better."""
    plan = thunk.plan
    if not (plan.m and plan.n and plan.k):
        return None
    if min(plan.m, plan.n) <= _FEW and plan.k >= _LONG and plan.a.column == plan.b.row == 1:
        return _dots(thunk)
    if plan.epilogue is not None:
        return None
    if plan.n == 1 and plan.a.row == plan.c.row == 1 and plan.m > 1:
        return _columns(thunk, plan.m, plan.a, plan.b, plan.a.column, plan.b.row, swapped=False)
    if plan.m == 1 and plan.b.column == plan.c.column == 1 and plan.n > 1:
        return _columns(thunk, plan.n, plan.b, plan.a, plan.b.row, plan.a.column, swapped=True)
    return None


def _size(view: View, batch: tuple[int, ...], rows: int, columns: int) -> int:
    """Elements of an array up to the last one that a view reaches."""
    steps = zip((*batch, rows, columns), (*view.batch, view.row, view.column))
    return view.offset + sum((extent - 1) * stride for extent, stride in steps) + 1


def _place(view: View, indices: list[tuple[int, int]]) -> Index:
    """Offset of a view, its batch dims first, and so many steps along some dims."""
    index = constant(view.offset)
    for number, stride in [*enumerate(view.batch), *indices]:
        index = index + dim(number) * stride
    return index


def _accumulator(plan: MatmulPlan) -> str:
    return "f64" if plan.a.dtype == "f64" else "f32"


def _dots(thunk: MatmulThunk) -> KernelThunk:
    """A row per element of the result, k along it."""
    plan, batch = thunk.plan, len(thunk.plan.batch)
    b = PlanBuilder(plan.name, (*plan.batch, plan.m, plan.n, plan.k), row_dims=1)
    sums = _accumulator(plan)
    m, n, k = batch, batch + 1, batch + 2
    factors = []
    slices = [thunk.a, thunk.b]
    for name, view, shape, along in (
        ("a", plan.a, (plan.m, plan.k), [(m, plan.a.row), (k, 1)]),
        ("b", plan.b, (plan.k, plan.n), [(k, 1), (n, plan.b.column)]),
    ):
        array = b.operand(name, view.dtype, _size(view, plan.batch, *shape))
        factors.append(b.convert(b.load(array, _place(view, along)), sums))
    total = b.reduce_row("add", b.apply("multiply", *factors))
    if plan.epilogue is None:
        c = b.operand("c", plan.c.dtype, _size(plan.c, plan.batch, plan.m, plan.n))
        place = _place(plan.c, [(m, plan.c.row), (n, plan.c.column)])
        b.store(c, place, b.convert(total, plan.c.dtype))
        return KernelThunk(thunk.name, b.finish(), (*slices, thunk.operands[0]))
    slices += _continue(b, plan.epilogue, plan.sums, total, thunk)
    return KernelThunk(thunk.name, b.finish(), tuple(slices))


def _continue(b: PlanBuilder, epilogue: KernelPlan, sums: int, total: int, thunk: MatmulThunk) -> list[Slice]:
    """Add an epilogue's nodes over the same leading dims; returns the slices of its operands."""
    arrays: dict[int, int] = {}
    slices: list[Slice] = []
    for number, operand in enumerate(epilogue.operands):
        if number != sums:
            arrays[number] = b.operand(f"e{number}", operand.dtype, operand.size)
            slices.append(thunk.operands[number])
    numbers = {-1: -1}  # -1 stands for no guard
    for number, node in enumerate(epilogue.nodes):
        if isinstance(node, Load) and node.operand == sums:
            numbers[number] = total
        elif isinstance(node, Load):
            place, where = node.index.renumber(numbers), numbers[node.where]
            numbers[number] = b.load(arrays[node.operand], place, where=where)
        elif isinstance(node, Constant):
            numbers[number] = b.constant(node.value, node.dtype)
        elif isinstance(node, IndexValue):
            numbers[number] = b.index(node.index.renumber(numbers), node.dtype)
        else:
            assert isinstance(node, Apply), "an epilogue has no reductions"
            numbers[number] = b.apply(node.op, *(numbers[a] for a in node.args), dtype=node.dtype)
    for item in epilogue.stores:
        place, where = item.index.renumber(numbers), numbers[item.where]
        b.store(arrays[item.operand], place, numbers[item.node], combine=item.combine, where=where)
    return slices


def _columns(
    thunk: MatmulThunk, length: int, matrix: View, vector: View, along: int, step: int, *, swapped: bool
) -> KernelThunk:
    """Sums over k, the outer dim, of rows that are as long as the result."""
    plan, batch = thunk.plan, len(thunk.plan.batch)
    b = PlanBuilder(plan.name, (*plan.batch, plan.k, length), batch_dims=batch, row_dims=1)
    sums, k, row = _accumulator(plan), batch, batch + 1
    shapes = {"a": (plan.m, plan.k), "b": (plan.k, plan.n)}
    wide = b.operand("matrix", matrix.dtype, _size(matrix, plan.batch, *shapes["b" if swapped else "a"]))
    thin = b.operand("vector", vector.dtype, _size(vector, plan.batch, *shapes["a" if swapped else "b"]))
    c = b.operand("c", plan.c.dtype, _size(plan.c, plan.batch, plan.m, plan.n))
    x = b.convert(b.load(wide, _place(matrix, [(k, along), (row, 1)])), sums)
    y = b.convert(b.load(thin, _place(vector, [(k, step)])), sums)
    total = b.reduce_column("add", b.apply("multiply", x, y))
    b.store(c, _place(plan.c, [(row, 1)]), b.convert(total, plan.c.dtype))
    slices = (thunk.b, thunk.a) if swapped else (thunk.a, thunk.b)
    return KernelThunk(thunk.name, b.finish(), (*slices, thunk.operands[0]))
