"""Sums over rows, row by row and by strips of columns, against the evaluator."""

import ctypes
import mmap
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.column import ColumnKernel
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.backends.native_cpu.kernels.row import RowKernel
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import constant, dim, linear, strides_of
from mpmd.compile.kernels.operations import NUMPY_DTYPE, REDUCTIONS
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from tests.support.targets import runs_here

BF16 = ml_dtypes.bfloat16


def without_caches(target, l3_bytes=1 << 20):
    """A target for which every array is larger than the second cache, and with 0 than all of them."""
    return replace(target, l2_bytes=0, l3_bytes=l3_bytes)


HOST, AVX2 = host_target(), named_target("avx2")
TARGETS = {"host": without_caches(HOST), "far": without_caches(HOST, 0)}
if runs_here(AVX2):
    TARGETS["avx2"] = without_caches(AVX2, 0)


def check(plan, arrays, *, shift=0, kind=RowKernel):
    """Run a plan on every target, with one thread and with three: both give the evaluator's numbers.

    Integers, and floats that are small ones, are exact in any order.  Returns the last results.  Without a
    `kind` any kernel may come first.
    """
    wanted = [a.copy() for a in arrays]
    evaluate(plan, wanted)
    got = wanted
    for name, target in TARGETS.items():
        sequence = plan_kernels(plan, target)
        assert kind is None or type(sequence.kernels[0]) is kind
        for threads in (1, 3):
            got = []
            for array in arrays:
                memory = aligned_empty((array.size + shift,), array.dtype)[shift:]
                memory[:] = array
                got.append(memory)
            DirectSequence(sequence, target, threads=threads)(*got)
            for operand, g, w in zip(plan.operands, got, wanted, strict=True):
                message = f"{operand.name} on {name} with {threads} threads"
                np.testing.assert_array_equal(g.astype(np.float64), w.astype(np.float64), err_msg=message)
    return got


def whole_numbers(size, dtype, seed=0, most=4):
    """Small whole numbers, whose sums are exact in every type that holds them."""
    low = 0 if dtype.startswith("u") or dtype == "pred" else -most
    high = 2 if dtype == "pred" else most + 1
    return np.random.default_rng(seed).integers(low, high, size).astype(NUMPY_DTYPE[dtype])


def columns(shape, dtype, op="add", *, batch=0):
    """`op` over the rows of an array, in the array's own type."""
    b = PlanBuilder("columns", shape, batch_dims=batch, row_dims=1)
    x = b.load_dense(b.operand("x", dtype, int(np.prod(shape))))
    kept = (*range(batch), len(shape) - 1)
    size = int(np.prod([shape[d] for d in kept]))
    b.store_dense(b.operand("y", dtype, size), b.reduce_column(op, x), kept)
    return b.finish(), size


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["pred", "s8", "u16", "s32", "s64", "bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("op", ["add", "maximum", "minimum"])
def test_every_type_and_reduction(dtype, op):
    if dtype not in REDUCTIONS[op].dtypes:
        pytest.skip(f"{op} is not defined for {dtype}")
    shape = (45, 297)
    plan, size = columns(shape, dtype, op)
    check(plan, [whole_numbers(shape[0] * shape[1], dtype), np.zeros(size, NUMPY_DTYPE[dtype])])


@pytest.mark.fast_cases
@pytest.mark.parametrize("rows", [2, 3, 5, 8, 31, 64, 67, 300])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_any_number_of_rows(rows, dtype):
    plan, size = columns((rows, 330), dtype)
    x = whole_numbers(rows * 330, dtype, most=1)
    check(plan, [x, np.zeros(size, NUMPY_DTYPE[dtype])])


@pytest.mark.fast_cases
@pytest.mark.parametrize("width", [257, 288, 303, 320, 2049, 9000])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("shift", [0, 3])
def test_any_number_of_columns(width, dtype, shift):
    """Several vectors, one vector, a part of one; rows that start anywhere."""
    plan, size = columns((37, width), dtype)
    check(plan, [whole_numbers(37 * width, dtype), np.zeros(size, NUMPY_DTYPE[dtype])], shift=shift)


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("width", [2, 15, 16, 33, 48, 65, 256])
def test_rows_as_narrow_as_registers(width, dtype):
    plan, size = columns((70, width), dtype)
    x = whole_numbers(70 * width, dtype, most=1)
    check(plan, [x, np.zeros(size, NUMPY_DTYPE[dtype])], kind=None)
    plan = norm_gradients(70, width, dtype)
    check(plan, [whole_numbers(o.size, o.dtype, seed, 2) for seed, o in enumerate(plan.operands)], kind=None)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_batch_dims(dtype):
    plan, size = columns((3, 2, 41, 270), dtype, batch=2)
    check(plan, [whole_numbers(3 * 2 * 41 * 270, dtype), np.zeros(size, NUMPY_DTYPE[dtype])])


def norm_gradients(rows, width, dtype, stores=""):
    """The gradients of a normalisation's gain and shift, from x, g, and each row's mean and scale.

    `element` in `stores` keeps the product of every point, `row` the double of a row's value and its sum.
    """
    b, n = PlanBuilder("norm_gradients", (rows, width), row_dims=1), rows * width
    x, g = (b.convert(b.load_dense(b.operand(name, dtype, n)), "f32") for name in "xg")
    mean, scale = (b.load(b.operand(name, "f32", rows), dim(0)) for name in "ms")
    along = b.apply("multiply", g, b.apply("multiply", b.apply("subtract", x, mean), scale))
    for name, value, op in (("gain", along, "add"), ("shift", g, "add"), ("most", x, "maximum")):
        result = b.convert(b.reduce_column(op, value), "f32")
        b.store_dense(b.operand(name, "f32", width), result, (1,))
    if "element" in stores:
        b.store_dense(b.operand("along", dtype, n), b.convert(along, dtype))
    if "row" in stores:
        b.store_dense(b.operand("twice", "f32", rows), b.apply("add", mean, mean), (0,))
        b.store(b.operand("means", "f32", 1), constant(0), b.reduce_column("add", mean))
    return b.finish()


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("stores", ["", "element", "row", "element row"])
@pytest.mark.parametrize("rows,width", [(70, 290), (9, 4500)])
def test_several_sums_at_once(dtype, stores, rows, width):
    plan = norm_gradients(rows, width, dtype, stores)
    assert plan.kind == "column"
    dtypes = [o.dtype for o in plan.operands]
    arrays = [whole_numbers(o.size, d, seed, 2) for seed, (o, d) in enumerate(zip(plan.operands, dtypes))]
    arrays[3] = np.abs(arrays[3])
    check(plan, arrays)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_results_that_go_past_the_caches(dtype):
    """Aligned rows are streamed beyond every cache, and written as ever from another start."""
    plan = norm_gradients(64, 320, dtype, "element")
    arrays = [whole_numbers(o.size, o.dtype, seed, 2) for seed, o in enumerate(plan.operands)]
    streamed = plan_kernels(plan, TARGETS["far"]).kernels[0].streamed
    assert len(streamed) == TARGETS["far"].is_x86
    for shift in (0, 1):
        check(plan, arrays, shift=shift)


def test_rows_in_pieces_and_steps():
    """Two row dims that do not lie one after the other, and rows of a larger array's columns."""
    b = PlanBuilder("pieces", (40, 3, 30), row_dims=2)
    x = b.load(b.operand("x", "bf16", 40 * 90), linear([dim(1), dim(0), dim(2)], strides_of((3, 40, 30))))
    b.store_dense(b.operand("y", "f32", 90), b.reduce_column("add", b.convert(x, "f32")), (1, 2))
    check(b.finish(), [whole_numbers(40 * 90, "bf16"), np.zeros(90, np.float32)])
    b = PlanBuilder("steps", (40, 300), row_dims=1)
    x = b.load(b.operand("x", "f32", 40 * 1000), dim(0) * 1000 + dim(1) * 3 + 7)
    y = b.load(b.operand("z", "bf16", 40 * 300), dim(0) * 300 + dim(1) * -1 + 299)
    total = b.reduce_column("add", b.apply("subtract", x, b.convert(y, "f32")))
    b.store_dense(b.operand("y", "f32", 300), total, (1,))
    check(
        b.finish(), [whole_numbers(40_000, "f32"), whole_numbers(12_000, "bf16"), np.zeros(300, np.float32)]
    )


def test_rows_that_are_numbered_and_guarded():
    b = PlanBuilder("guarded", (33, 300), row_dims=1)
    inside = b.apply("compare-lt", b.index(dim(0) + dim(1)), b.constant(300, "s64"))
    x = b.load(b.operand("x", "bf16", 9900), dim(0) * 300 + dim(1), where=inside)
    x = b.convert(b.apply("select", inside, x, b.constant(0.0, "bf16")), "f32")
    value = b.apply("add", x, b.convert(b.index(dim(1) + dim(0) * -1), "f32"))
    b.store_dense(b.operand("y", "f32", 300), b.reduce_column("add", value), (1,))
    check(b.finish(), [whole_numbers(9900, "bf16"), np.zeros(300, np.float32)])


def test_bf16_beside_f32():
    b = PlanBuilder("mixed", (50, 299), row_dims=1)
    x, y = (b.convert(b.load_dense(b.operand(n, "bf16", 50 * 299)), "f32") for n in "xy")
    gain, row = b.load(b.operand("g", "f32", 299), dim(1)), b.load(b.operand("r", "bf16", 50), dim(0))
    value = b.apply("multiply", b.apply("add", b.apply("multiply", x, y), gain), b.convert(row, "f32"))
    b.store_dense(b.operand("s", "f32", 299), b.reduce_column("add", value), (1,))
    plan = b.finish()
    check(plan, [whole_numbers(o.size, o.dtype, k) for k, o in enumerate(plan.operands)])


def test_not_a_number_and_infinity_stay_in_their_column():
    rows, width = 40, 300
    x = np.ones((rows, width), BF16)
    x[3, 0], x[4, 33], x[9, 64], x[39, 64], x[20, 299] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    plan, size = columns((rows, width), "bf16")
    with np.errstate(invalid="ignore"):
        y = check(plan, [x.reshape(-1), np.zeros(size, BF16)])[1].astype(np.float32)
    assert np.isnan(y[[0, 64]]).all() and y[33] == np.inf and y[299] == -np.inf
    assert (np.delete(y, [0, 33, 64, 299]) == rows).all()


def test_sums_are_as_exact_as_sums_of_short_runs():
    rows, width = 5000, 260
    x = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32) + 1
    plan, size = columns((rows, width), "f32")
    y = np.zeros(size, np.float32)
    DirectSequence(plan_kernels(plan, TARGETS["host"]), TARGETS["host"])(x.reshape(-1), y)
    np.testing.assert_allclose(y, x.astype(np.float64).sum(0), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_nothing_is_read_beyond_the_end(dtype):
    """The last element lies at the end of the last page that there is."""
    rows, width, kind = 33, 333, NUMPY_DTYPE[dtype]
    values = whole_numbers(rows * width, dtype)
    pages = -(-values.nbytes // mmap.PAGESIZE)
    memory = np.frombuffer(mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE), np.uint8)
    end = pages * mmap.PAGESIZE
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + end), mmap.PAGESIZE, 0)
    x = memory[end - values.nbytes : end].view(kind)
    x[:] = values
    plan, count = columns((rows, width), dtype)
    y = np.zeros(count, kind)
    DirectSequence(plan_kernels(plan, TARGETS["far"]), TARGETS["far"])(x, y)
    np.testing.assert_array_equal(y.astype(np.float32), values.astype(np.float32).reshape(rows, width).sum(0))


def test_which_kernel_adds_up():
    host = host_target()

    def first(shape, target=host):
        return plan_kernels(columns(shape, "f32")[0], target).kernels[0]

    rows = 2 * host.l2_bytes // (4 * 3072)
    assert isinstance(first((rows, 3072)), RowKernel), "a strip would read a new page with every row"
    assert isinstance(first((64, 256)), ColumnKernel), "all of it stays in a cache"
    assert isinstance(first((100_000, host.lanes())), ColumnKernel), "a strip is a row"
    narrow = norm_gradients(64, 8, "f32", "row")
    assert isinstance(plan_kernels(narrow, host).kernels[0], RowKernel), "what happens once per row"
    b = PlanBuilder("numbers", (1000, 4), row_dims=1)
    b.store(
        b.operand("y", "f32", 1),
        constant(0),
        b.reduce_column("add", b.load(b.operand("x", "f32", 1000), dim(0))),
    )
    assert isinstance(plan_kernels(b.finish(), host).kernels[0], RowKernel), "no element is added up"
