"""Every elementwise operation and reduction on every dtype: the CPU's code against NumPy's meaning."""

import warnings

import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.kernels.operations import EMITTERS
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.operations import FLOATS, INTEGERS, NARROW, NUMPY_DTYPE, OPERATIONS, REDUCTIONS
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.errors import CompileError
from tests.support.targets import runs_here

SIZE = 149
NARROW_TYPES = [NUMPY_DTYPE[name] for name in NARROW]
TARGETS = {"host": host_target(), "avx2": named_target("avx2")}
# libm and the vector library round on their own: relative error allowed, in units of the dtype's epsilon
LOOSE = {"tanh": 8, "erf": 8, "logistic": 4, "power": 4, "rsqrt": 3}


def samples(dtype, seed):
    """Ordinary values and the edges of a dtype."""
    rng = np.random.default_rng(seed)
    kind = NUMPY_DTYPE[dtype]
    if dtype == "pred":
        return rng.integers(0, 2, SIZE).astype(kind)
    if dtype in NARROW:
        return rng.integers(0, 1 << DTYPES[dtype].bits, SIZE, dtype=np.uint8).view(kind)
    if dtype in INTEGERS:
        info = np.iinfo(kind)
        values = rng.integers(info.min, info.max, SIZE, dtype=kind, endpoint=True)
        small = rng.integers(0 if info.min == 0 else -9, 40, SIZE // 2).astype(kind)
        values[: small.size] = small
        values[-6:] = [info.min, info.max, 0, 1, info.max - 1, info.min]
        return rng.permutation(values)
    values = (rng.standard_normal(SIZE) * np.exp(rng.uniform(-6, 4, SIZE))).astype(kind)
    values[:8] = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5]
    return rng.permutation(values)


def run(plan, arrays, target):
    """The plan's operands after the kernel and after the evaluator."""
    native, expected = [a.copy() for a in arrays], [a.copy() for a in arrays]
    evaluate(plan, expected)
    DirectSequence(plan_kernels(plan, target), target)(*native)
    return native, expected


def same(got, expected, what, ulps=2.0):
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected, err_msg=what)
        return
    if got.dtype in NARROW_TYPES:
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32), err_msg=what)
        return
    epsilon = 2.0 ** -{"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}[got.dtype.name]
    np.testing.assert_allclose(
        got.astype(np.float64), expected.astype(np.float64), rtol=ulps * epsilon, atol=1e-38, err_msg=what
    )


def test_every_operation_has_code():
    assert set(EMITTERS) | {"convert", "bitcast-convert"} == set(OPERATIONS)
    assert set(REDUCTIONS) <= set(EMITTERS)


@pytest.mark.fast_cases
@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("dtype", sorted(NUMPY_DTYPE))
def test_elementwise(dtype, target):
    """All operations of a dtype in one kernel with a result each."""
    if not runs_here(TARGETS[target]):
        pytest.skip(f"{target} does not run here")
    b = PlanBuilder("operations", (SIZE,))
    x, y, p = b.operand("x", dtype, SIZE), b.operand("y", dtype, SIZE), b.operand("p", "pred", SIZE)
    arrays, names = [samples(dtype, 0), samples(dtype, 1), samples("pred", 2)], []
    vx, vy, vp = (b.load_dense(o) for o in (x, y, p))
    for name, operation in OPERATIONS.items():
        if operation.result == "given" or dtype not in operation.dtypes:
            continue
        args = (
            {1: (vx,), 2: (vx, vy), 3: (vy, vx, b.apply("maximum", vx, vy))}[operation.arity]
            if name != "select"
            else (vp, vx, vy)
        )
        if name == "clamp":
            args = (b.apply("minimum", vx, vy), vx, b.apply("maximum", vx, vy))
        value = b.apply(name, *args)
        out = "pred" if operation.result == "pred" else dtype
        b.store_dense(b.operand(name, out, SIZE), value)
        arrays.append(np.zeros(SIZE, NUMPY_DTYPE[out]))
        names.append(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native, expected = run(b.finish(), arrays, TARGETS[target])
    for name, got, wanted in zip(names, native[3:], expected[3:], strict=True):
        same(got, wanted, f"{name} of {dtype} on {target}", LOOSE.get(name, 2.0))


@pytest.mark.parametrize("source", sorted(NUMPY_DTYPE))
def test_conversions(source):
    b = PlanBuilder("conversions", (SIZE,))
    value = b.load_dense(b.operand("x", source, SIZE))
    arrays, names = [samples(source, 3)], []
    for dtype, kind in NUMPY_DTYPE.items():
        for op in ("convert", "bitcast-convert"):
            if dtype == source:
                continue
            same_size = np.dtype(kind).itemsize == arrays[0].dtype.itemsize
            if op == "bitcast-convert" and ("pred" in (source, dtype) or not same_size):
                continue
            b.store_dense(b.operand(f"{op}-{dtype}", dtype, SIZE), b.apply(op, value, dtype=dtype))
            arrays.append(np.zeros(SIZE, kind))
            names.append((op, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native, expected = run(b.finish(), arrays, host_target())
    for (op, dtype), got, wanted in zip(names, native[1:], expected[1:], strict=True):
        same(got, wanted, f"{op} of {source} to {dtype}", 1.0)


@pytest.mark.parametrize("source", ["f32", "f64"])
def test_floats_at_the_bounds_of_integers(source):
    """Beside each bound, on it and far beyond."""
    kind = NUMPY_DTYPE[source]
    edges = [2.0**bits + step for bits in (7, 8, 15, 16, 31, 32, 63, 64) for step in (-1, -0.5, 0, 0.5, 1)]
    values = np.array([*edges, 0.5, 0.0, np.inf, 1e30], kind)
    values = np.concatenate([values, -values])
    above, below = (np.nextafter(values, kind(far)) for far in (np.inf, -np.inf))
    values = np.concatenate([values, above, below, np.array([np.nan, -np.nan], kind)])
    b = PlanBuilder("bounds", (values.size,))
    value = b.load_dense(b.operand("x", source, values.size))
    arrays = [values]
    for dtype in INTEGERS:
        b.store_dense(b.operand(dtype, dtype, values.size), b.apply("convert", value, dtype=dtype))
        arrays.append(np.zeros(values.size, NUMPY_DTYPE[dtype]))
    with np.errstate(all="ignore"):
        native, expected = run(b.finish(), arrays, host_target())
    for dtype, got, wanted in zip(INTEGERS, native[1:], expected[1:], strict=True):
        same(got, wanted, f"{source} to {dtype}")


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("dtype", sorted({*FLOATS, *INTEGERS, "pred"}))
def test_reductions(dtype, axis):
    rows, width = 90, 37
    data = np.resize(samples(dtype, 4), rows * width)
    if dtype in FLOATS:
        data = np.where(np.isfinite(data.astype(np.float64)), data, 1).astype(data.dtype)
        data = (np.sign(data.astype(np.float64)) * np.clip(np.abs(data.astype(np.float64)), 0.5, 1.3)).astype(
            data.dtype
        )
        data[5 * width + 3] = np.nan
    b = PlanBuilder("reductions", (rows, width), row_dims=1)
    value = b.load_dense(b.operand("x", dtype, rows * width))
    arrays, names = [data], []
    for name, reduction in REDUCTIONS.items():
        if dtype in reduction.dtypes:
            reduced = b.reduce_row(name, value) if axis == "row" else b.reduce_column(name, value)
            size = rows if axis == "row" else width
            b.store_dense(b.operand(name, dtype, size), reduced, (0,) if axis == "row" else (1,))
            arrays.append(np.zeros(size, data.dtype))
            names.append(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native, expected = run(b.finish(), arrays, host_target())
    for name, got, wanted in zip(names, native[1:], expected[1:], strict=True):
        if dtype in FLOATS and name in ("add", "multiply"):
            # another order of additions: the bound grows with the length
            scale = 1.3 * (90 if name == "add" else 1)
            wide = got.astype(np.float64), wanted.astype(np.float64)
            epsilon = 2.0 ** -{"bf16": 7, "f16": 10, "f32": 20, "f64": 48}[dtype]
            np.testing.assert_allclose(
                *wide, rtol=2 * epsilon, atol=epsilon * scale, err_msg=f"{name} of {dtype}"
            )
        else:
            same(got, wanted, f"{name} of {dtype}", 0)


def test_what_the_cpu_lacks_is_said():
    b = PlanBuilder("odd", (4,))
    value = b.load_dense(b.operand("x", "f32", 4))
    b.store_dense(b.operand("y", "f32", 4), value)
    plan = b.finish()
    object.__setattr__(plan.operands[0], "dtype", "c64")
    with pytest.raises(CompileError, match="the native CPU backend has no c64"):
        plan_kernels(plan, host_target())
