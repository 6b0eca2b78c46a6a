"""Kernels over rows, in caches and beyond, of bf16, quotients by one number, NaNs; against the evaluator."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import constant, dim
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import emit_assembly
from mpmd.compile.llvm.function_builder import Module
from tests.support.targets import runs_here

BF16 = ml_dtypes.bfloat16
TARGETS = [t for t in (host_target(), named_target("avx2")) if runs_here(t)]
WITHOUT_BF16 = [t for t in (named_target("avx512"),) if runs_here(t)]  # instructions for them
TOLERANCE = {"f32": 2e-5, "bf16": 1.6e-2}


def run(plan, arrays, target, *, shift=0, threads=1):
    """The plan's results on copies of arrays, each starting some elements past a line."""
    copies = []
    for array in arrays:
        memory = aligned_empty((array.size + shift,), array.dtype)[shift:]
        memory[:] = array
        copies.append(memory)
    DirectSequence(plan_kernels(plan, target), target, threads=threads)(*copies)
    return copies


def inputs(plan, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(o.size) * 2 + 1).astype(NUMPY_DTYPE[o.dtype]) for o in plan.operands]


def check(plan, dtype, *, targets=TARGETS, shift=0):
    """All targets against the evaluator, any number of threads against one."""
    given = inputs(plan)
    wanted = [a.copy() for a in given]
    evaluate(plan, wanted)
    for target in targets:
        one, three = (run(plan, given, target, shift=shift, threads=n) for n in (1, 3))
        for got, again, expected in zip(one, three, wanted, strict=True):
            np.testing.assert_array_equal(got, again)
            scale = np.abs(expected.astype(np.float64)).max(initial=1)
            np.testing.assert_allclose(
                got.astype(np.float64), expected.astype(np.float64),
                rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale * 0.1,
            )  # fmt: skip


def layer_norm(rows, width, dtype, *, in_place=False):
    b = PlanBuilder("layer_norm", (rows, width), row_dims=1)
    op, inverse = b.apply, b.constant(1 / width, "f32")
    source = b.operand("x", dtype, rows * width)
    x = b.convert(b.load_dense(source), "f32")
    gain, shift = (b.convert(b.load_dense(b.operand(n, dtype, width), (1,)), "f32") for n in "gb")
    mean = op("multiply", b.reduce_row("add", x), inverse)
    centred = op("subtract", x, mean)
    variance = op("multiply", b.reduce_row("add", op("multiply", centred, centred)), inverse)
    scale = op("rsqrt", op("add", variance, b.constant(1e-5, "f32")))
    y = op("add", op("multiply", op("multiply", centred, scale), gain), shift)
    b.store_dense(source if in_place else b.operand("y", dtype, rows * width), b.convert(y, dtype))
    b.store_dense(b.operand("mean", "f32", rows), mean, (0,))
    return b.finish()


def softmax(rows, width, dtype):
    b = PlanBuilder("softmax", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    e = b.apply("exponential", b.apply("subtract", x, b.reduce_row("maximum", x)))
    y = b.apply("divide", e, b.reduce_row("add", e))
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(y, dtype))
    return b.finish()


# -- norms --------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows,width", [(1, 40), (9, 33), (16, 64), (18, 1), (21, 100), (17, 770)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_that_share_a_gain(dtype, rows, width, in_place):
    plan = layer_norm(rows, width, dtype, in_place=in_place)
    check(plan, dtype, targets=TARGETS + (WITHOUT_BF16 if dtype == "bf16" else []), shift=rows % 4)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows,width", [(256, 100), (64, 33), (66, 48)])
def test_sums_over_rows_beside_rows(dtype, rows, width):
    b = PlanBuilder("gains", (rows, width), row_dims=1)
    x, g = (b.convert(b.load_dense(b.operand(n, dtype, rows * width)), "f32") for n in "xg")
    gain = b.convert(b.load_dense(b.operand("w", dtype, width), (1,)), "f32")
    weighted = b.apply("multiply", g, gain)
    along = b.reduce_row("add", b.apply("multiply", weighted, x))
    along = b.apply("multiply", along, b.constant(1 / width, "f32"))
    y = b.apply("subtract", weighted, b.apply("multiply", x, along))
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(y, dtype))
    b.store_dense(b.operand("dw", "f32", width), b.reduce_column("add", b.apply("multiply", g, along)), (1,))
    b.store_dense(b.operand("most", "f32", width), b.reduce_column("maximum", weighted), (1,))
    check(b.finish(), dtype)


def far(target):
    """A target whose caches hold next to nothing."""
    return replace(target, l2_bytes=256, l3_bytes=512)


def norm_gradient(rows, width, dtype):
    b = PlanBuilder("norm_gradient", (rows, width), row_dims=1)
    op, inverse = b.apply, b.constant(1 / width, "f32")
    x, g = (b.convert(b.load_dense(b.operand(n, dtype, rows * width)), "f32") for n in "xg")
    mean = op("multiply", b.reduce_row("add", g), inverse)
    along = op("multiply", b.reduce_row("add", op("multiply", g, x)), inverse)
    y = op("subtract", op("subtract", g, mean), op("multiply", x, along))
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(y, dtype))
    return b.finish()


def mean_squares(rows, width, dtype):
    b = PlanBuilder("mean_squares", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    gain = b.convert(b.load_dense(b.operand("g", dtype, width), (1,)), "f32")
    mean = b.apply("multiply", b.reduce_row("add", b.apply("multiply", x, x)), b.constant(1 / width, "f32"))
    y = b.apply("multiply", b.apply("multiply", x, b.apply("rsqrt", mean)), gain)
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(y, dtype))
    return b.finish()


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows,width", [(9, 768), (33, 512), (31, 160), (24, 2048), (17, 64)])
@pytest.mark.parametrize("make", [layer_norm, mean_squares, norm_gradient])
def test_norms_past_the_caches(make, rows, width, dtype):
    targets = [far(t) for t in TARGETS + (WITHOUT_BF16 if dtype == "bf16" else [])]
    check(make(rows, width, dtype), dtype, targets=targets)


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "rows,width", [(1, 40), (2, 16), (3, 768), (7, 100), (17, 517), (5, 1024), (4, 1300)]
)
@pytest.mark.parametrize("make", [layer_norm, norm_gradient, softmax])
def test_rows_past_the_caches(make, rows, width, dtype):
    targets = [far(t) for t in TARGETS + (WITHOUT_BF16 if dtype == "bf16" else [])]
    for shift in (0, 3):  # stores past the caches, and not
        check(make(rows, width, dtype), dtype, targets=targets, shift=shift)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_of_two_dims_past_the_caches(dtype):
    rows, outer, width = 6, 3, 80
    b = PlanBuilder("planes", (rows, outer, width), row_dims=2)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * outer * width)), "f32")
    most = b.reduce_row("maximum", x)
    b.store_dense(b.operand("y", dtype, rows * outer * width), b.convert(b.apply("subtract", x, most), dtype))
    check(b.finish(), dtype, targets=[far(t) for t in TARGETS])


@pytest.mark.parametrize("stores", ["in order", "transposed"])
@pytest.mark.parametrize("caches", [{"l2_bytes": 256}, {"l2_bytes": 256, "l3_bytes": 512}])
def test_three_passes_over_rows_of_two_dims(stores, caches):
    rows, outer, width = 9, 12, 80
    whole = outer * width
    b = PlanBuilder("planes", (rows, outer, width), row_dims=2)
    x = b.load(b.operand("x", "f32", rows * (whole + 16)), dim(0) * (whole + 16) + dim(1) * width + dim(2))
    gain = b.load(b.operand("g", "f32", 2 * whole), dim(1) * (2 * width) + dim(2))  # dims that do not merge
    for _ in range(2):
        mean = b.apply("multiply", b.reduce_row("add", x), b.constant(1 / whole, "f32"))
        x = b.apply("subtract", x, mean)
    place = dim(1) * width + dim(2) if stores == "in order" else dim(2) * outer + dim(1)
    b.store(b.operand("y", "f32", rows * whole), dim(0) * whole + place, b.apply("multiply", x, gain))
    targets = [replace(t, l1_bytes=64 << 10, **caches) for t in TARGETS]
    check(b.finish(), "f32", targets=targets)


def test_sums_over_rows_past_the_caches():
    rows, width = 64, 96
    b = PlanBuilder("gains", (rows, width), row_dims=1)
    x, g = (b.load_dense(b.operand(n, "f32", rows * width)) for n in "xg")
    along = b.reduce_row("add", b.apply("multiply", g, x))
    b.store_dense(b.operand("y", "f32", rows * width), b.apply("multiply", x, along))
    b.store_dense(b.operand("dw", "f32", width), b.reduce_column("add", b.apply("multiply", g, along)), (1,))
    check(b.finish(), "f32", targets=[far(t) for t in TARGETS])


# -- expensive functions of rows ---------------------------------------------------------------------------


def log_sums(rows, width, dtype, sums=False):
    b = PlanBuilder("log_sums", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    most = b.reduce_row("maximum", x)
    total = b.reduce_row("add", b.apply("exponential", b.apply("subtract", x, most)))
    log = b.apply("add", b.apply("log", total), most)
    b.store_dense(b.operand("y", "f32", rows), log, (0,))
    if sums:
        b.store(b.operand("all", "f32", 1), constant(0), b.reduce_column("add", log))
    return b.finish()


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows,width", [(8, 40), (9, 1), (23, 100), (31, 517), (64, 32)])
@pytest.mark.parametrize("make", [softmax, log_sums])
def test_rows_of_exponentials(make, rows, width, dtype):
    check(make(rows, width, dtype), dtype, shift=rows % 3)


@pytest.mark.parametrize("rows,width", [(256, 33), (64, 100)])
def test_rows_of_exponentials_that_are_summed(rows, width):
    check(log_sums(rows, width, "f32", sums=True), "f32")


def test_nan_and_infinity_stay_in_their_row():
    rows, width = 16, 37
    plan = softmax(rows, width, "f32")
    x = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    x[3, 5], x[7], x[11, 2], x[15] = np.nan, -np.inf, np.inf, -200
    for target in TARGETS:
        _, got = run(plan, [x.reshape(-1), np.zeros(rows * width, np.float32)], target)
        got = got.reshape(x.shape)
        broken = [3, 7, 11]
        assert np.isnan(got[broken]).any(axis=1).all()
        whole = [row for row in range(rows) if row not in broken]
        e = np.exp(x[whole] - x[whole].max(axis=1, keepdims=True))
        np.testing.assert_allclose(got[whole], e / e.sum(axis=1, keepdims=True), rtol=1e-5)


# -- rows of bf16 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 15, 31, 32, 33, 64, 100, 128, 517])
def test_softmax_of_bf16(width):
    check(softmax(5, width, "bf16"), "bf16", shift=width % 3)


@pytest.mark.parametrize("kind", ["half", "halves and floats", "guarded", "every second"])
def test_rows_of_bf16_with_other_loads(kind):
    rows, width = 12, 71
    b = PlanBuilder("mixed", (rows, width), row_dims=1)
    x = b.convert(b.load_dense(b.operand("x", "bf16", rows * width)), "f32")
    other = x
    if kind == "halves and floats":
        other = b.load_dense(b.operand("z", "f32", rows * width))
    elif kind == "guarded":
        inside = b.apply("compare-lt", b.index(b.dense((1,))), b.constant(50, "s64"))
        z = b.load(b.operand("z", "bf16", rows * width), b.dense((0, 1)), where=inside)
        other = b.convert(b.apply("select", inside, z, b.constant(0.0, "bf16")), "f32")
    elif kind == "every second":
        z = b.operand("z", "bf16", 2 * rows * width)
        other = b.convert(b.load(z, b.dense((0, 1)) * 2), "f32")
    total = b.reduce_row("add", b.apply("multiply", b.apply("abs", x), b.constant(0.01, "f32")))
    y = b.apply("multiply", b.apply("subtract", x, total), other)
    b.store_dense(b.operand("y", "bf16", rows * width), b.convert(y, "bf16"))
    b.store_dense(b.operand("s", "f32", rows), total, (0,))
    check(b.finish(), "bf16")


def test_bf16_that_is_stored_as_it_was_read_keeps_its_bits():
    """Denormals and the bits of NaNs too."""
    rows, width = 8, 96
    b = PlanBuilder("through", (rows, width), row_dims=1)
    x = b.load_dense(b.operand("x", "bf16", rows * width))
    b.store_dense(b.operand("most", "bf16", rows), b.reduce_row("maximum", x), (0,))
    b.store_dense(b.operand("y", "bf16", rows * width), x)
    bits = np.random.default_rng(0).integers(0, 1 << 16, rows * width).astype(np.uint16)
    for target in TARGETS:
        zeros = [np.zeros(n, BF16) for n in (rows, rows * width)]
        got = run(b.finish(), [bits.view(BF16), *zeros], target)
        np.testing.assert_array_equal(got[2].view(np.uint16), bits)


@pytest.mark.fast_cases
@pytest.mark.parametrize("width", [64, 128, 160])
@pytest.mark.parametrize("shift", [0, 16, 1])
def test_bf16_go_past_the_caches_line_by_line(width, shift):
    rows, target = 40, replace(host_target(), l3_bytes=1 << 10)
    for plan in (layer_norm(rows, width, "bf16"), softmax(rows, width, "bf16")):
        sequence = plan_kernels(plan, target)
        assert sequence.kernels[0].streamed
        module = Module(target)
        sequence.kernels[0].emit(module)
        if target.bf16_dot:
            assembly = emit_assembly(module)
            assert "vmovnt" in assembly and "vcvtneps2bf16" in assembly
        check(plan, "bf16", targets=[target], shift=shift)


# -- extremes and quotients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["maximum", "minimum"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("width", [1, 7, 16, 48, 85, 130])
def test_one_nan_anywhere_in_a_row_is_its_maximum(op, dtype, width):
    rows = width + 2  # row r has its NaN at r; the last two have none
    b = PlanBuilder("most", (rows, width), row_dims=1)
    x = b.load_dense(b.operand("x", dtype, rows * width))
    b.store_dense(b.operand("y", dtype, rows), b.reduce_row(op, x), (0,))
    x = np.random.default_rng(width).standard_normal((rows, width)).astype(NUMPY_DTYPE[dtype])
    x[np.arange(width), np.arange(width)] = np.nan
    x[-1] = -np.inf if op == "maximum" else np.inf
    wanted = np.asarray(x.astype(np.float32).max(1) if op == "maximum" else x.astype(np.float32).min(1))
    for target in TARGETS:
        got = run(b.finish(), [x.reshape(-1), np.zeros(rows, x.dtype)], target)[1]
        np.testing.assert_array_equal(got.astype(np.float32), wanted)


def quotients(rows, width):
    b = PlanBuilder("quotients", (rows, width), row_dims=1)
    x = b.load_dense(b.operand("x", "f32", rows * width))
    b.store_dense(b.operand("y", "f32", rows * width), b.apply("divide", x, b.reduce_row("maximum", x)))
    return b.finish()


def test_quotients_by_one_number_are_rounded_once():
    rows, width = 600, 100
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-4, 25, (rows, 1))
    x = x.astype(np.float32)
    x[:20] *= np.float32(1e-20)  # the divisor is small: no inverse
    x[20:40] = -np.abs(x[20:40])
    x[40:60] = 3e38 * rng.uniform(-1, 1, (20, width))
    x[60:70, 3], x[70:80, 3], x[80:90] = np.inf, np.nan, 0
    x[90:100], x[100:110, 5], x[110:120] = -np.inf, -np.inf, 0
    x[110:120, 1] = 1e-30
    x[120:130] = -1e-3
    x[120:130, :20] = -3e38  # a quotient beyond all floats
    with np.errstate(all="ignore"):
        wanted = x / x.max(1, keepdims=True)
    for target in TARGETS:
        got = run(quotients(rows, width), [x.reshape(-1), np.zeros(x.size, np.float32)], target)[1]
        np.testing.assert_array_equal(got.reshape(x.shape), wanted)


# -- 1 + tanh -----------------------------------------------------------------------------------------------


def gelu(size, form, dtype="f32"):
    """As written by hand, and as JAX writes it; or with a tanh that is used a second time."""
    b = PlanBuilder("gelu", (size,))
    op = b.apply
    x = b.convert(b.load_dense(b.operand("x", dtype, size)), "f32")
    cubic = op("multiply", op("multiply", op("multiply", x, x), x), b.constant(0.044715, "f32"))
    u = op("multiply", b.constant(np.sqrt(2 / np.pi), "f32"), op("add", x, cubic))
    t = op("tanh", u)
    half, one = b.constant(0.5, "f32"), b.constant(1.0, "f32")
    if form == "half of x":
        y = op("multiply", op("multiply", x, half), op("add", t, one))
    elif form == "bare":
        y = op("add", one, t)
    else:
        y = op("multiply", x, op("multiply", half, op("add", one, t)))
    b.store_dense(b.operand("y", dtype, size), b.convert(y, dtype))
    if form == "tanh twice":
        b.store_dense(b.operand("t", dtype, size), b.convert(t, dtype))
    return b.finish()


@pytest.mark.parametrize("form", ["half of x", "half of the sum", "bare", "tanh twice"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gelu_of_any_form(form, dtype):
    check(gelu(1003, form, dtype), dtype)
