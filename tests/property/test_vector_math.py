"""The vector math library against NumPy and SciPy in double precision, in units in the last place."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from mpmd.compile.backends.native_cpu.math.elementary import BINARY, UNARY
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import compile_module, emit_assembly
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import vector
from tests.support.targets import runs_here

REFERENCE = {
    "cbrt": np.cbrt,
    "cos": np.cos,
    "erf": special.erf,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": special.expit,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}
BOUND = {
    "cbrt": 1.5,
    "cos": 1.6,
    "erf": 6.0,
    "exp": 1.1,
    "expm1": 1.5,
    "log": 1.0,
    "log1p": 1.5,
    "logistic": 3.0,
    "rsqrt": 1.5,
    "sin": 1.6,
    "sqrt": 0.5001,
    "tan": 1.5,
    "tanh": 6.0,
}
EDGES = [0.0, np.inf, np.nan, 1.0, 0.5, 2.0, 1e-45, 1e-40, 1.17549435e-38, 3.4028235e38, 1e-20, 1e20]
EDGES += [
    87.0,
    88.72283,
    88.72284,
    89.0,
    103.9,
    104.1,
    127.0,
    128.0,
    16777216.0,
    0.3465736,
    0.70710678,
    1.4142136,
]
TARGETS = {"host": host_target(), "avx2": named_target("avx2"), "avx512": named_target("avx512")}
MODULE_CACHE: dict = {}


def kernel_module(target, emit, operands, element):
    """out[i] = emit(x[i], ...) over whole vectors; n is a multiple of the lanes."""
    module, lanes = Module(target), target.lanes("float")
    names = [f"x{k}" for k in range(operands)]
    arguments = [(n, "ptr") for n in [*names, "out"]] + [("n", "i64")]
    with FunctionBuilder(module, "apply", arguments) as f, f.loop(0, f.arguments["n"], lanes) as loop:
        values = [f.load(f.arguments[n], vector(element, lanes), loop.i) for n in names]
        f.store(emit(f, *values), f.arguments["out"], loop.i)
    return module


def evaluate(name, *arrays, target="host"):
    """The emitted function on equally long arrays."""
    key = (name, target, arrays[0].dtype)
    if key not in MODULE_CACHE:
        element = {"float32": "float", "float64": "double"}[arrays[0].dtype.name]
        emit = UNARY.get(name) or BINARY[name]
        module = kernel_module(TARGETS[target], emit, len(arrays), element)
        pointers = [ctypes.c_void_p] * (len(arrays) + 1)
        MODULE_CACHE[key] = compile_module(module, ["apply"]).function("apply", *pointers, ctypes.c_int64)
    size = -(-arrays[0].size // 16) * 16
    padded = [np.resize(a, size) for a in arrays]
    out = np.empty(size, arrays[0].dtype)
    MODULE_CACHE[key](*(a.ctypes.data for a in padded), out.ctypes.data, size)
    return out[: arrays[0].size]


def ulps(got, exact):
    """Distance from the exact (double) value in last places; infinity stands where 2^128 would."""
    both_nan = np.isnan(got) & np.isnan(exact)
    top = np.float64(2.0**128)
    with np.errstate(all="ignore"):
        value, ideal = (np.clip(v.astype(np.float64), -top, top) for v in (got, exact))
        unit = np.spacing(np.abs(np.clip(ideal, -3.4e38, 3.4e38)).astype(np.float32)).astype(np.float64)
        distance = np.abs(value - ideal) / unit
    return np.where(both_nan, 0, np.where(np.isnan(distance), np.inf, distance))


def sample(step):
    """Every `step`-th float32 bit pattern, both signs, and the edges."""
    bits = np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32)
    edges = np.array(EDGES, np.float32)
    return np.concatenate([bits.view(np.float32), edges, -edges])


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary_f32_within_its_bound(name, target):
    if not runs_here(TARGETS[target]):
        pytest.skip(f"{target} does not run here")
    x = sample(1 << 13 if target == "host" else 1 << 16)
    with np.errstate(all="ignore"):
        exact = REFERENCE[name](x.astype(np.float64))
    got = evaluate(name, x, target=target)
    distance = ulps(got, exact)
    worst = int(distance.argmax())
    assert distance[worst] <= BOUND[name], f"{name}({x[worst]!r}) = {got[worst]!r}, exactly {exact[worst]!r}"
    zeros = exact == 0
    signed = zeros & (x == 0)
    assert (np.signbit(got[signed]) == np.signbit(exact[signed])).all(), "the sign of a zero"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(UNARY) - {"cbrt", "tan"}))
def test_unary_f32_on_a_dense_sample(name):
    for first in range(0, 1 << 32, 1 << 28):
        x = np.arange(first, first + (1 << 28), 29, dtype=np.uint64).astype(np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            exact = REFERENCE[name](x.astype(np.float64))
        distance = ulps(evaluate(name, x), exact)
        worst = int(distance.argmax())
        assert distance[worst] <= BOUND[name], f"{name}({x[worst]!r}): {distance[worst]} ulp"


@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary_f64_is_libm(name):
    x = np.concatenate([np.random.default_rng(0).standard_normal(500) * 10, np.array(EDGES)])
    with np.errstate(all="ignore"):
        exact = REFERENCE[name](x)
    np.testing.assert_allclose(evaluate(name, x), exact, rtol=4e-15, atol=1e-300)


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_far_from_zero_it_is_one(name, target):
    if not runs_here(TARGETS[target]):
        pytest.skip(f"{target} does not run here")
    far = {"tanh": 9.0112, "erf": 3.9196}[name]  # 1 is nearest from a little before
    x = np.concatenate([np.geomspace(far, 3e38, 500), [np.inf]]).astype(np.float32)
    np.testing.assert_array_equal(evaluate(name, x, target=target), 1.0)
    np.testing.assert_array_equal(evaluate(name, -x, target=target), -1.0)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_pow_f32(target):
    if not runs_here(TARGETS[target]):
        pytest.skip(f"{target} does not run here")
    rng = np.random.default_rng(1)
    n = 200_000
    x = np.exp(rng.uniform(-80, 80, n)).astype(np.float32) * rng.choice([-1, 1], n).astype(np.float32)
    y = rng.uniform(-4, 4, n).astype(np.float32)
    y[: n // 3] = rng.integers(-6, 7, n // 3)
    x[n // 2 :] = 1 + rng.uniform(-0.2, 0.2, n - n // 2)
    y[n // 2 :] = rng.uniform(-900, 900, n - n // 2)
    edges = np.array([*EDGES, 3.0, 0.25, 1000000000.0], np.float32)
    grid = np.concatenate([edges, -edges])
    x = np.concatenate([x, np.repeat(grid, grid.size)])
    y = np.concatenate([y, np.tile(grid, grid.size)])
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.float64), y.astype(np.float64))
    got = evaluate("pow", x, y, target=target)
    distance = ulps(got, exact)
    worst = int(distance.argmax())
    assert distance[worst] <= 0.7, f"pow({x[worst]!r}, {y[worst]!r}) = {got[worst]!r}, not {exact[worst]!r}"
    zeros = exact == 0
    assert (np.signbit(got[zeros]) == np.signbit(exact[zeros])).all()


def test_binary_f64_and_atan2():
    rng = np.random.default_rng(2)
    x, y = rng.uniform(0.1, 9, 320), rng.uniform(-9, 9, 320)
    np.testing.assert_allclose(evaluate("pow", x, y), np.power(x, y), rtol=1e-14)
    np.testing.assert_allclose(evaluate("atan2", y, x), np.arctan2(y, x), rtol=1e-14)
    x32, y32 = x.astype(np.float32), y.astype(np.float32)
    np.testing.assert_allclose(evaluate("atan2", y32, x32), np.arctan2(y32, x32), rtol=3e-7)


@settings(max_examples=60, deadline=None)
@given(st.floats(width=32), st.floats(width=32))
def test_algebra_of_pow_and_exp(x, y):
    """What must hold for every pair of floats, whatever the bits."""
    a, b = np.full(16, x, np.float32), np.full(16, y, np.float32)
    one = evaluate("pow", a, np.zeros(16, np.float32))
    assert (one == 1).all()
    e = evaluate("exp", a)
    assert np.isnan(e).all() if np.isnan(x) else (e >= 0).all()
    ordered = evaluate("exp", np.sort(np.stack([a, b]), axis=0).ravel())
    if not np.isnan(x) and not np.isnan(y):
        assert (ordered[:16] <= ordered[16:]).all(), "exp is monotonic"
    t = evaluate("tanh", a)
    assert np.isnan(x) or (np.abs(t) <= 1).all()


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "log"])
def test_neon_needs_no_calls(name):
    assembly = emit_assembly(kernel_module(named_target("neon"), UNARY[name], 1, "float"))
    assert "fmla" in assembly and "\tbl\t" not in assembly
