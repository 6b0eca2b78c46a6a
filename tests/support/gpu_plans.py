"""Plans of every family of GPU kernels, and what their kernels compute against what they mean."""

import numpy as np

from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim, value
from mpmd.compile.kernels.operations import NUMPY_DTYPE


def softmax(rows, width, dtype="f32"):
    b = PlanBuilder("softmax", (rows, width), row_dims=1)
    x, y = b.operand("x", dtype, rows * width), b.operand("y", dtype, rows * width)
    v = b.convert(b.load_dense(x), "f32")
    e = b.apply("exponential", b.apply("subtract", v, b.reduce_row("maximum", v)))
    b.store_dense(y, b.convert(b.apply("divide", e, b.reduce_row("add", e)), dtype))
    return b.finish()


def transposed(rows, columns, dtype="f32"):
    b = PlanBuilder("transpose", (rows, columns))
    n = rows * columns
    b.store_dense(b.operand("y", dtype, n), b.load(b.operand("x", dtype, n), dim(1) * rows + dim(0)))
    return b.finish()


def column_sums(rows, width, dtype="f32", op="add", batch=1):
    """Sums over rows, their square, and a total, beside a store at every point."""
    b = PlanBuilder("sums", (batch, rows, width), batch_dims=1, row_dims=1)
    v = b.load_dense(b.operand("x", dtype, batch * rows * width))
    total = b.reduce_column(op, v)
    b.store_dense(b.operand("sums", dtype, batch * width), b.apply("multiply", total, total), (0, 2))
    b.store_dense(b.operand("minus", dtype, batch * rows * width), b.apply("negate", v))
    row = b.reduce_column(op, b.load(b.operand("r", dtype, batch * rows), dim(0) * rows + dim(1)))
    b.store_dense(b.operand("total", dtype, batch), row, (0,))
    return b.finish()


def scatter(dtype, combine="add", points=50, places=20):
    b = PlanBuilder("scatter", (points,))
    at = b.load(b.operand("ids", "s32", points), dim(0))
    inside = b.apply("compare-ge", at, b.constant(0, "s32"))
    b.store(b.operand("y", dtype, places), value(at), b.load_dense(b.operand("x", dtype, points)),
            combine=combine, where=inside)  # fmt: skip
    return b.finish()


def check(plan, arrays=None, programs=8):
    """A plan's kernels against its evaluator; what no store writes keeps its canary."""
    from tests.support.triton_interpreter import differences, run_plan  # needs Triton

    rng = np.random.default_rng(0)
    given = []
    for number, operand in enumerate(plan.operands):
        kind = NUMPY_DTYPE[operand.dtype]
        if arrays and operand.name in arrays:
            given.append(np.asarray(arrays[operand.name]).astype(kind))
        elif number in plan.results:
            given.append(np.full(operand.size, 99).astype(kind))
        else:
            given.append((rng.standard_normal(operand.size) * 3).astype(kind))
    found, wanted = [a.copy() for a in given], [a.copy() for a in given]
    run_plan(plan, found, programs)
    evaluate(plan, wanted)
    assert differences(plan, found, wanted) == []
