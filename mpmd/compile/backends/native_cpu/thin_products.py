"""Products of a matrix whose rows are contiguous, and a vector, as reductions.

A tile of a matrix product has rows and whole vectors of columns, and a product with one column leaves most of
it empty.  Where the matrix is contiguous along K dot products are used (`gemm/thin.py`); where it is
contiguous along its rows, one of its columns times a number is added to the result, k times.
"""

from __future__ import annotations

from mpmd.compile.kernels.index import Index, constant, dim
from mpmd.compile.kernels.matmul import MatmulPlan, View
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.thunks.thunk import KernelThunk, MatmulThunk


def as_reduction(thunk: MatmulThunk) -> KernelThunk | None:
    """The same product as a reduction, or None where tiles are better."""
    plan = thunk.plan
    if not (plan.m and plan.n and plan.k) or plan.epilogue is not None:
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
