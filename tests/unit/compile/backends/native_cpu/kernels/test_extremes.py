"""Maxima and minima by IEEE 754-2019: NaN is kept, and 0 is larger than -0."""

import ctypes

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.kernels.operations import emit_operation
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import named_target
from mpmd.compile.llvm.engine import compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import vector
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.targets import runs_here

pytestmark = pytest.mark.optimized

VALUES = (0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 2.5)
DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def native(function, *arguments):
    with jax.enable_x64(any(np.asarray(a).dtype == np.float64 for a in arguments)):
        fragment = fragment_of(function, *arguments)
    return run(fragment, list(arguments), compiled(fragment))


def expected(op, *values):
    """One after the other."""
    if any(np.isnan(v) for v in values):
        return np.nan
    best = max(values) if op == "maximum" else min(values)
    positive = [not np.signbit(v) for v in values if v == 0]
    if best == 0:
        return 0.0 if (any(positive) if op == "maximum" else all(positive)) else -0.0
    return best


def check(got, want):
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])


PAIRS = [(a, b) for a in VALUES for b in VALUES]


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["maximum", "minimum"])
def test_of_two_arrays_and_of_a_constant(op, dtype):
    a, b = (np.array(v).astype(DTYPES[dtype]) for v in zip(*PAIRS))
    function = getattr(jnp, op)
    check(native(function, a, b)[0], [expected(op, *pair) for pair in PAIRS])
    for one in (0.0, -0.0, 1.0):
        (got,) = native(lambda a, one=one: function(a, np.asarray(one).astype(DTYPES[dtype])), a)
        check(got, [expected(op, v, one) for v, _ in PAIRS])


@pytest.mark.parametrize("name", ["avx2", "avx512"])
@pytest.mark.parametrize("op", ["maximum", "minimum"])
def test_of_scalars_and_registers_of_every_target(op, name):
    target = named_target(name)
    if not runs_here(target):
        pytest.skip(f"{name} does not run here")
    for lanes in (1, target.lanes()):
        module, type_ = Module(target), vector("float", lanes)
        arguments = [("x", "ptr"), ("y", "ptr"), ("out", "ptr")]
        with FunctionBuilder(module, "apply", arguments) as f, f.loop(0, 64, lanes) as loop:
            x, y = (f.load(f.arguments[k], type_, loop.i) for k in ("x", "y"))
            f.store(emit_operation(f, op, (x, y), ("f32", "f32"), "f32"), f.arguments["out"], loop.i)
        apply = compile_module(module, ["apply"]).function("apply", *[ctypes.c_void_p] * 3)
        a, b = (np.array(v, np.float32) for v in zip(*PAIRS))
        out = np.empty_like(a)
        apply(a.ctypes.data, b.ctypes.data, out.ctypes.data)
        check(out, [expected(op, *pair) for pair in PAIRS])


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("size", [1, 7, 17, 100])
def test_of_rows_and_columns_with_one_special_value_anywhere(op, size, dtype):
    name = {"max": "maximum", "min": "minimum"}[op]
    other = -1.0 if op == "max" else 1.0  # so that zeros decide
    rows = [np.full(size, other)]
    for special in (np.nan, 0.0, -0.0):
        for place in {0, size // 2, size - 1}:
            row = np.full(size, -0.0 if special == 0 and not np.signbit(special) else other)
            row[place] = special
            rows.append(row)
    x = np.stack(rows).astype(DTYPES[dtype])
    want = [expected(name, *row) for row in rows]
    along, across = native(lambda x, y: (getattr(x, op)(-1), getattr(y, op)(0)), x, np.ascontiguousarray(x.T))
    check(along, want)
    check(across, want)


def test_of_places_that_are_written_twice():
    zeros = np.array([0.0, -0.0, 0.0, -0.0, np.nan], np.float32)
    updates = np.array([-0.0, 0.0, 0.0, -0.0, 1.0], np.float32)
    places = np.arange(5)
    least, most = native(
        lambda a, b, n: (a.at[n].min(b), a.at[n].max(b)), zeros, updates, places.astype(np.int32)
    )
    pairs = list(zip(zeros, updates))
    check(least, [expected("minimum", *pair) for pair in pairs])
    check(most, [expected("maximum", *pair) for pair in pairs])


def test_clamp_is_a_minimum_of_a_maximum():
    x = np.array([0.0, -0.0, np.nan, 3.0, -3.0], np.float32)
    zero = np.float32(0)
    (got,) = native(lambda x: jax.lax.clamp(zero, x, np.float32(2)), x)
    check(got, [0.0, 0.0, np.nan, 2.0, 0.0])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("op", ["maximum", "minimum"])
def test_the_meaning_of_plans_is_the_same(op, dtype):
    x = np.array(PAIRS).astype(DTYPES[dtype])
    b = PlanBuilder("rows", x.shape, row_dims=1)
    value = b.load_dense(b.operand("x", dtype, x.size))
    b.store(b.operand("y", dtype, len(PAIRS)), dim(0), b.reduce_row(op, value))
    got = np.empty(len(PAIRS), DTYPES[dtype])
    evaluate(b.finish(), [x.reshape(-1), got])
    check(got, [expected(op, *pair) for pair in PAIRS])


def test_of_columns_in_a_pass_over_rows():
    """Partial results of groups of rows begin with the neutral element, which is not zero."""
    x = np.random.default_rng(0).standard_normal((300, 70)).astype(np.float32)
    y = x - x.max(-1, keepdims=True) - 1
    np.testing.assert_array_equal(native(lambda x: (x - x.max(-1, keepdims=True) - 1).max(0), x)[0], y.max(0))
