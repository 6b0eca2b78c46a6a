"""Plans of every family of GPU kernels, and what their kernels compute against what they mean."""

import numpy as np

from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim, value
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder


def softmax(rows, width, dtype="f32"):
    b = PlanBuilder("softmax", (rows, width), row_dims=1)
    x, y = b.operand("x", dtype, rows * width), b.operand("y", dtype, rows * width)
    v = b.convert(b.load_dense(x), "f32")
    e = b.apply("exponential", b.apply("subtract", v, b.reduce_row("maximum", v)))
    b.store_dense(y, b.convert(b.apply("divide", e, b.reduce_row("add", e)), dtype))
    return b.finish()


def long_loss(rows, width, padding=47):
    """Of each row the logarithm of its label's probability, and the gradients in the memory of the logits."""
    n = width + padding
    b = PlanBuilder("loss", (rows, n), row_dims=1)
    labels, logits = b.operand("labels", "s32", rows), b.operand("logits", "bf16", rows * n)
    x = b.convert(b.load_dense(logits), "f32")
    label = b.load(labels, dim(0))
    position, zero, share = b.index(dim(1), "s32"), b.constant(0.0, "f32"), b.constant(0.125, "f32")
    there = b.apply("compare-lt", position, b.constant(width, "s32"))
    hit = b.apply("compare-eq", position, label)

    def inside(value, filler=zero):
        return b.apply("select", there, value, filler)

    top = b.reduce_row("maximum", inside(x, b.constant(-np.inf, "f32")))
    below = b.apply("subtract", x, top)
    e = b.apply("exponential", below)
    total = b.reduce_row("add", inside(e))
    log = b.apply("subtract", below, b.apply("log", total))
    weight = b.reduce_row("add", inside(b.apply("select", hit, share, zero)))
    gradient = b.apply("multiply", b.apply("divide", weight, total), e)
    gradient = b.apply("subtract", gradient, b.apply("select", hit, share, zero))
    b.store_dense(logits, b.convert(inside(gradient), "bf16"))
    picked = b.reduce_row("add", inside(b.apply("select", hit, log, zero)))
    b.store(b.operand("picked", "f32", rows), dim(0), picked)
    b.store(b.operand("total", "f32", rows), dim(0), total)
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
