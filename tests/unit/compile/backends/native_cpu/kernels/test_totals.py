"""Sums of all elements, against the evaluator."""

from dataclasses import replace

import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.backends.native_cpu.kernels.row import RowKernel
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import constant, dim
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from tests.support.targets import runs_here

HOST, AVX2 = replace(host_target(), l3_bytes=0), named_target("avx2")
TARGETS = {"host": HOST} | ({"avx2": replace(AVX2, l3_bytes=0)} if runs_here(AVX2) else {})


def run(plan, arrays, target, *, threads=1, shift=0):
    """What a plan makes of arrays that start some elements after a line."""
    got = []
    for array in arrays:
        memory = aligned_empty((array.size + shift,), array.dtype)[shift:]
        memory[:] = array
        got.append(memory)
    sequence = plan_kernels(plan, target)
    assert isinstance(sequence.kernels[0], RowKernel)
    DirectSequence(sequence, target, threads=threads)(*got)
    return got


def check(plan, arrays, *, shift=0):
    """Whole numbers are exact in any order: every target and number of threads gives the evaluator's."""
    wanted = [a.copy() for a in arrays]
    evaluate(plan, wanted)
    for name, target in TARGETS.items():
        for threads in (1, 3):
            got = run(plan, arrays, target, threads=threads, shift=shift)
            for operand, g, w in zip(plan.operands, got, wanted, strict=True):
                message = f"{operand.name} on {name} with {threads} threads"
                np.testing.assert_array_equal(g.astype(np.float64), w.astype(np.float64), err_msg=message)


def whole_numbers(size, dtype, seed=0):
    low = 0 if dtype.startswith("u") else -3
    return np.random.default_rng(seed).integers(low, 4, size).astype(NUMPY_DTYPE[dtype])


def square_sum(shape, dtype, *, batch=0, row_dims=1):
    """The sum of all squares, in f32 where the elements are narrow floats."""
    b, size = PlanBuilder("square_sum", shape, batch_dims=batch, row_dims=row_dims), int(np.prod(shape))
    x, kind = b.load_dense(b.operand("x", dtype, size)), "f32" if dtype in ("bf16", "f16") else dtype
    x = b.convert(x, kind) if kind != dtype else x
    total = b.reduce_column("add", b.reduce_row("add", b.apply("multiply", x, x)))
    results = int(np.prod(shape[:batch]))
    b.store(b.operand("y", kind, results), dim(0) if batch else constant(0), total)
    return b.finish(), [whole_numbers(size, dtype), np.zeros(results, NUMPY_DTYPE[kind])]


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "s32", "u16", "s64"])
@pytest.mark.parametrize("shape", [(1, 64), (3, 77), (4, 300), (70, 33), (131, 130), (2, 5000)])
def test_every_shape_and_type(dtype, shape):
    check(*square_sum(shape, dtype))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_that_start_anywhere(dtype):
    check(*square_sum((67, 131), dtype), shift=3)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_batches_and_rows_of_several_dims(dtype):
    check(*square_sum((3, 41, 65), dtype, batch=1))
    check(*square_sum((37, 3, 50), dtype, row_dims=2))


def two_sums(rows, width, dtype):
    """The sum of products of two arrays, and that of one of them."""
    b, n = PlanBuilder("two_sums", (rows, width), row_dims=1), rows * width
    x, y = (b.convert(b.load_dense(b.operand(name, dtype, n)), "f32") for name in "xy")
    for name, value in (("products", b.apply("multiply", x, y)), ("sum", x)):
        b.store(b.operand(name, "f32", 1), constant(0), b.reduce_column("add", b.reduce_row("add", value)))
    return b.finish()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows,width", [(5, 64), (70, 257)])
def test_several_sums_at_once(dtype, rows, width):
    plan = two_sums(rows, width, dtype)
    check(plan, [whole_numbers(o.size, o.dtype, seed) for seed, o in enumerate(plan.operands)])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_sums_are_exact_and_no_thread_changes_them(dtype):
    plan, arrays = square_sum((400, 4096), dtype)
    arrays[0][:] = np.random.default_rng(0).standard_normal(arrays[0].size) + 1
    first, *others = (run(plan, arrays, HOST, threads=n)[1][0] for n in (1, 2, 3))
    np.testing.assert_allclose(first, (arrays[0].astype(np.float64) ** 2).sum(), rtol=1e-6)
    assert all(other.tobytes() == first.tobytes() for other in others)


def test_not_a_number_and_infinity():
    plan, arrays = square_sum((9, 100), "f32")
    arrays[0][5] = np.inf
    assert run(plan, arrays, HOST)[1][0] == np.inf
    arrays[0][899] = np.nan
    assert np.isnan(run(plan, arrays, HOST)[1][0])
