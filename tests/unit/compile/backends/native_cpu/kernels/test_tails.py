"""The last vector of a row: nothing is written beyond it, whatever is stored, by whatever kernel."""

import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from tests.support.targets import runs_here

TARGETS = [t for t in (host_target(), named_target("avx512"), named_target("avx2")) if runs_here(t)]
BEYOND = 64
DTYPES = [("s32", "s8"), ("s32", "u16"), ("s64", "s32"), ("f32", "bf16"), ("f32", "f16"), ("f32", "f8e5m2")]


def element_by_element(rows, width, of, to):
    b = PlanBuilder("elements", (rows, width))
    x = b.load_dense(b.operand("x", of, rows * width))
    b.store_dense(b.operand("y", to, rows * width), b.convert(b.apply("add", x, x), to))
    return b.finish()


def over_rows(rows, width, of, to):
    b = PlanBuilder("rows", (rows, width), row_dims=1)
    x = b.load_dense(b.operand("x", of, rows * width))
    total = b.apply("add", x, b.reduce_row("maximum", x))
    b.store_dense(b.operand("y", to, rows * width), b.convert(total, to))
    return b.finish()


def over_columns(rows, width, of, to):
    b = PlanBuilder("columns", (rows, width), row_dims=1)
    x = b.load_dense(b.operand("x", of, rows * width))
    b.store_dense(b.operand("y", to, width), b.convert(b.reduce_column("maximum", x), to), (1,))
    b.store_dense(b.operand("z", to, rows * width), b.convert(b.apply("add", x, x), to))
    return b.finish()


def transposed(rows, width, of, to):
    b = PlanBuilder("transposed", (width, rows))
    x = b.load(b.operand("x", of, rows * width), dim(1) * width + dim(0))
    b.store_dense(b.operand("y", to, rows * width), b.convert(x, to))
    return b.finish()


@pytest.mark.fast_cases
@pytest.mark.parametrize("make", [element_by_element, over_rows, over_columns, transposed])
@pytest.mark.parametrize("of,to", DTYPES)
@pytest.mark.parametrize("rows,width", [(1, 17), (3, 18), (3, 33), (33, 33), (17, 49)])
def test_narrow_results_end_where_they_end(make, of, to, rows, width):
    """A single lane that is left over is stored as narrow as the others."""
    plan = make(rows, width, of, to)
    numbers = np.random.default_rng(0).integers(0, 3, rows * width)
    for target in TARGETS:
        sequence = plan_kernels(plan, target)
        operands = sequence.plan.operands
        memory = [aligned_empty((o.size + BEYOND,), NUMPY_DTYPE[o.dtype]) for o in operands]
        for array in memory:
            array[:] = 1
        memory[0][: rows * width] = numbers.astype(NUMPY_DTYPE[of])
        arrays = [m[: o.size] for o, m in zip(operands, memory, strict=True)]
        wanted = [a.copy() for a in arrays]
        evaluate(sequence.plan, wanted)
        DirectSequence(sequence, target)(*arrays)
        for array, expected, whole in zip(arrays, wanted, memory, strict=True):
            np.testing.assert_array_equal(array, expected)
            assert (whole[array.size :].astype(np.float32) == 1).all(), target
