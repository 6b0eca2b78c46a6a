"""Kernels that memory binds: rows of bf16, sums over rows, transposes; against NumPy and the evaluator."""

from dataclasses import replace

import ml_dtypes
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
from mpmd.compile.llvm.engine import emit_assembly
from mpmd.compile.llvm.function_builder import Module
from mpmd.compile.llvm.llvm_types import Value
from mpmd.compile.llvm.squares import transpose
from tests.support.targets import runs_here

BF16 = ml_dtypes.bfloat16
TARGETS = [t for t in (host_target(), named_target("avx2")) if runs_here(t)]


def run(plan, arrays, target, shift=0):
    """The plan's results on copies of arrays, each starting some elements past a line."""
    copies = []
    for array in arrays:
        memory = aligned_empty((array.size + shift,), array.dtype)[shift:]
        memory[:] = array
        copies.append(memory)
    DirectSequence(plan_kernels(plan, target), target)(*copies)
    return copies


def expected(plan, arrays):
    copies = [a.copy() for a in arrays]
    evaluate(plan, copies)
    return copies


# -- bf16 by twos -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 15, 16, 31, 32, 33, 64, 100, 515])
@pytest.mark.parametrize("shift", [0, 3])
def test_floats_are_rounded_to_bf16_as_numpy_rounds_them(size, shift):
    b = PlanBuilder("round", (size,))
    x = b.load_dense(b.operand("x", "f32", size))
    b.store_dense(b.operand("y", "bf16", size), b.convert(x, "bf16"))
    rng = np.random.default_rng(size)
    given = (rng.standard_normal(size) * 10.0 ** rng.integers(-30, 38, size)).astype(np.float32)
    special = [np.inf, -np.inf, np.nan, -0.0, 3.4e38, 1.00390625, 1.01171875]  # too large, and ties
    given[: min(size, len(special))] = special[:size]
    for target in TARGETS:
        got = run(b.finish(), [given, np.zeros(size, BF16)], target, shift)[1]
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got.astype(np.float32), given.astype(BF16).astype(np.float32))


def sums(rows, width, *, shifted=False):
    """Sums of x, of x·x and of x·y along rows of bf16."""
    b = PlanBuilder("sums", (rows, width), row_dims=1)
    x, y = (b.load_dense(b.operand(n, "bf16", rows * width)) for n in "xy")
    if shifted:  # a bf16 value that is not zero where x is
        x = b.apply("add", x, b.constant(1.0, "bf16"))
    x, y = b.convert(x, "f32"), b.convert(y, "f32")
    for name, value in (("s", x), ("q", b.apply("multiply", x, x)), ("d", b.apply("multiply", x, y))):
        b.store_dense(b.operand(name, "f32", rows), b.reduce_row("add", value), (0,))
    return b.finish()


@pytest.mark.parametrize("width", [1, 7, 16, 31, 64, 65, 200, 770])
@pytest.mark.parametrize("shifted", [False, True])
def test_sums_of_bf16_products(width, shifted):
    rows, plan = 5, sums(5, width, shifted=shifted)
    rng = np.random.default_rng(width)
    x, y = (rng.standard_normal(rows * width).astype(BF16) for _ in "xy")
    results = [np.zeros(rows, np.float32) for _ in range(3)]
    for target in TARGETS:
        for got, wanted in zip(run(plan, [x, y, *results], target)[2:], expected(plan, [x, y, *results])[2:]):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * width)


def test_sums_of_bf16_products_keep_nan_and_infinity():
    rows, width = 4, 37
    x, y = (np.ones((rows, width), BF16) for _ in "xy")
    x[0, 36], x[1, 3], x[2, 4], x[3, 1], x[3, 2] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    y[:, 36] = 0
    for target in TARGETS:
        s, q, d = run(
            sums(rows, width),
            [x.reshape(-1), y.reshape(-1), *(np.zeros(rows, np.float32) for _ in range(3))],
            target,
        )[2:]
        assert np.isnan([s[0], q[0], d[0], s[3], d[3]]).all()
        assert s[1] == q[1] == d[1] == q[2] == q[3] == np.inf and s[2] == d[2] == -np.inf


# -- blocks of rows -----------------------------------------------------------------------------------------


@pytest.mark.fast_cases
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
def test_three_passes_over_rows(rows, dtype):
    """Three passes, of which the second keeps what is expensive, and a result of each row."""
    width = 83
    b = PlanBuilder("blocks", (rows, width), row_dims=1)
    inside = "f64" if dtype == "f64" else "f32"
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), inside)
    e = b.apply("exponential", b.apply("subtract", x, b.reduce_row("maximum", x)))
    total = b.reduce_row("add", e)
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(b.apply("divide", e, total), dtype))
    b.store_dense(b.operand("t", inside, rows), b.apply("log", total), (0,))
    plan, kind = b.finish(), NUMPY_DTYPE[dtype]
    x = np.random.default_rng(0).standard_normal(rows * width).astype(kind)
    arrays = [x, np.zeros_like(x), np.zeros(rows, NUMPY_DTYPE[inside])]
    loose = {"bf16": 1e-2, "f32": 1e-5, "f64": 1e-12}[dtype]
    for target in TARGETS:
        for got, wanted in zip(run(plan, arrays, target)[1:], expected(plan, arrays)[1:], strict=True):
            np.testing.assert_allclose(got.astype(float), wanted.astype(float), rtol=loose, atol=loose * 1e-2)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("rows,width", [(1, 17), (2, 1), (9, 257), (40, 600), (70, 512)])
def test_sums_over_rows_of_any_number(dtype, rows, width):
    """One row alone, rows near and far apart, strips with and without a rest."""
    b = PlanBuilder("columns", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    b.store_dense(b.operand("z", "f32", rows * width), b.apply("negate", x))
    b.store_dense(b.operand("y", "f32", width), b.reduce_column("add", x), (1,))
    x = np.random.default_rng(0).integers(-8, 9, rows * width).astype(NUMPY_DTYPE[dtype])
    zeros = [np.zeros(rows * width, np.float32), np.zeros(width, np.float32)]
    for target in TARGETS:
        _, z, y = run(b.finish(), [x, *zeros], target)
        wide = x.astype(np.float32).reshape(rows, width)
        np.testing.assert_array_equal(z.reshape(rows, width), -wide)
        np.testing.assert_array_equal(y, wide.sum(0))


# -- squares ------------------------------------------------------------------------------------------------


class Names:
    """Stands for a builder: values are lists of names, and a shuffle picks from two of them."""

    def __init__(self):
        self.lanes = {}

    def value(self, element, names):
        value = Value(f"%{len(self.lanes)}", f"<{len(names)} x {element}>")
        self.lanes[value.text] = list(names)
        return value

    def shuffle(self, a, b, order):
        both = self.lanes[a.text] + self.lanes[b.text]
        return self.value(a.type[1:-1].split(" x ")[1], [both[lane] for lane in order])


@pytest.mark.parametrize("element", ["i8", "i16", "float", "double"])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_square_is_transposed(element, size):
    f = Names()
    rows = [f.value(element, [(r, c) for c in range(size)]) for r in range(size)]
    columns = [f.lanes[v.text] for v in transpose(f, rows)]
    assert columns == [[(r, c) for r in range(size)] for c in range(size)]


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["pred", "s8", "bf16", "s16", "f32", "f64"])
@pytest.mark.parametrize("rows,width", [(16, 16), (32, 64), (33, 20), (48, 31), (64, 96), (5, 3), (128, 130)])
def test_arrays_are_transposed(dtype, rows, width):
    b = PlanBuilder("transpose", (width, rows))
    x = b.load(b.operand("x", dtype, rows * width), dim(1) * width + dim(0))
    b.store_dense(b.operand("y", dtype, rows * width), x)
    given = np.random.default_rng(0).integers(0, 2, rows * width).astype(NUMPY_DTYPE[dtype])
    without_cache = replace(host_target(), l3_bytes=0)
    for target, shift in (*((t, 1) for t in TARGETS), (without_cache, 0), (without_cache, 1)):
        got = run(b.finish(), [given, np.zeros_like(given)], target, shift=shift)[1]
        np.testing.assert_array_equal(got.reshape(width, rows), given.reshape(rows, width).T)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_large_transposes_are_written_by_non_temporal_stores(dtype):
    b = PlanBuilder("transpose", (64, 64))
    x = b.load(b.operand("x", dtype, 64 * 64), dim(1) * 64 + dim(0))
    b.store_dense(b.operand("y", dtype, 64 * 64), x)
    for l3_bytes, wanted in ((0, True), (1 << 20, False)):
        target = replace(named_target("avx512"), l3_bytes=l3_bytes)
        module = Module(target)
        plan_kernels(b.finish(), target).kernels[0].emit(module)
        assert ("vmovnt" in emit_assembly(module)) is wanted


@pytest.mark.parametrize("rows,width", [(32, 48), (33, 20)])
def test_a_long_computation_on_a_transposed_array(rows, width):
    """More operations than are written once per row of a square: the square goes over the stack."""
    b = PlanBuilder("long", (width, rows))
    x = b.load(b.operand("x", "f32", rows * width), dim(1) * width + dim(0))
    y = b.load_dense(b.operand("w", "f32", rows * width))
    for _ in range(4):
        y = b.apply("add", b.apply("multiply", y, x), x)
    b.store_dense(b.operand("y", "f32", rows * width), y)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(rows * width).astype(np.float32) for _ in "xw")
    for target in TARGETS:
        got = run(b.finish(), [x, w, np.zeros_like(x)], target)[2]
        np.testing.assert_allclose(
            got, expected(b.finish(), [x, w, np.zeros_like(x)])[2], rtol=1e-4, atol=1e-4
        )
