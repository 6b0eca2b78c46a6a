"""Types of a byte or less: every conversion from and to them, and movement, which keeps every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mpmd.compile.compiler import compile_fragments
from mpmd.compile.hlo import parse_module
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import convert
from mpmd.compile.kernels.operations import FLOATS, INTEGERS, NARROW, NARROW_FLOATS, NARROW_INTEGERS
from tests.support.hlo_meaning import evaluate
from tests.support.native_fragments import fragment_of
from tests.support.native_hlo import run_module

PLAIN = (*FLOATS, *INTEGERS, "pred")


def every(dtype):
    """Each value of a type of at most 16 bits."""
    bits = DTYPES[dtype].bits
    return np.arange(1 << bits, dtype=np.uint16 if bits > 8 else np.uint8).view(DTYPES[dtype].numpy)


def sources(dtype):
    """Values that a conversion could get wrong: all of short types, of long ones those around ties."""
    rng = np.random.default_rng(0)
    if dtype == "pred":
        return np.array([False, True])
    if dtype in ("f32", "f64"):
        exponents = np.arange(100, 150, dtype=np.uint32)
        mantissas = np.arange(256, dtype=np.uint32) << 15
        near = (exponents[:, None] << 23 | mantissas).reshape(-1)
        anything = rng.integers(0, 1 << 32, 5000, dtype=np.uint32)
        tiny = rng.integers(0, 1 << 24, 500, dtype=np.uint32)
        bits = np.concatenate([near, near | 1 << 31, near + 1, near - 1, anything, tiny]).astype(np.uint32)
        found = bits.view(np.float32)
        if dtype == "f32":
            return found
        with np.errstate(invalid="ignore"):  # of NaN
            wide = found.astype(np.float64)
        return np.concatenate([wide, wide * (1 + 2.0**-40), wide * (1 - 2.0**-40), [1e300, -1e300]])
    if DTYPES[dtype].bits <= 16:
        return every(dtype)
    info = np.iinfo(DTYPES[dtype].numpy)
    kind = DTYPES[dtype].numpy
    anything = rng.integers(info.min, info.max, 2000, dtype=kind, endpoint=True)
    return np.concatenate(
        [anything, np.arange(0, 70000, 7).astype(kind), np.array([info.min, info.max], kind)]
    )


def conversions(source, targets, values):
    """A value of `source` as each of the targets, by native code."""
    lines = [f"r{k} = {t}[{values.size}] convert(a)" for k, t in enumerate(targets)]
    shape = ", ".join(f"{t}[{values.size}]" for t in targets)
    results = ", ".join(f"r{k}" for k in range(len(targets)))
    body = "\n".join([f"a = {source}[{values.size}] parameter(0)", *lines])
    text = f"HloModule m\nENTRY e {{\n{body}\nROOT r = ({shape}) tuple({results})\n}}"
    return run_module(parse_module(text), [values])


def wrong(source, target, values, got):
    """Where native code and the evaluator differ, in value or in the sign of a zero."""
    with np.errstate(all="ignore"):
        want = convert(values, source, target)
        if DTYPES[target].kind != "float":
            return np.flatnonzero(got.astype(np.int64) != want.astype(np.int64))
        a, b = got.astype(np.float64), want.astype(np.float64)
    differ = ~((a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        if target == "f4e2m1fn":  # it has no NaN, and a zero of either sign stands for it
            differ &= ~np.isnan(values.astype(np.float64))
        if source == "f8e8m0fnu" and target == "bf16":  # the instruction for it flushes denormals
            differ &= np.abs(b) >= 2.0**-126
    return np.flatnonzero(differ)


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("dtype", NARROW)
def test_every_value_converts_as_the_evaluator_says(dtype):
    targets = [t for t in (*PLAIN, *NARROW) if t != dtype]
    values = every(dtype)
    found = conversions(dtype, targets, values)
    problems = {t: wrong(dtype, t, values, got) for t, got in zip(targets, found)}
    assert not any(p.size for p in problems.values()), {t: values[p] for t, p in problems.items() if p.size}


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("source", PLAIN)
def test_wide_values_are_rounded_once(source):
    values = sources(source)
    found = conversions(source, NARROW, values)
    problems = {t: wrong(source, t, values, got) for t, got in zip(NARROW, found)}
    assert not any(p.size for p in problems.values()), {t: values[p] for t, p in problems.items() if p.size}


@pytest.mark.parametrize("dtype", NARROW)
def test_movement_keeps_bytes(dtype):
    """NaN of any sign and payload, the zeros, and each position once."""
    values = every(dtype)[:16] if DTYPES[dtype].bits < 8 else every(dtype)
    values = np.resize(values, 256).reshape(16, 16)
    text = f"""HloModule m
ENTRY e {{
  a = {dtype}[16,16] parameter(0)
  p = pred[16,16] parameter(1)
  z = {dtype}[] constant(1)
  t = {dtype}[16,16] transpose(a), dimensions={{1,0}}
  s = {dtype}[16,16] select(p, a, t)
  w = {dtype}[18,16] pad(s, z), padding=1_1x0_0
  c = {dtype}[34,16] concatenate(w, a), dimensions={{0}}
  ROOT r = {dtype}[34,16] reverse(c), dimensions={{1}}
}}"""
    chosen = np.arange(256).reshape(16, 16) % 3 == 0
    (got,) = run_module(parse_module(text), [values, chosen])
    raw, one = values.view(np.uint8), np.ones((1, 16)).astype(values.dtype).view(np.uint8)
    want = np.concatenate([one, np.where(chosen, raw, raw.T), one, raw])[:, ::-1]
    np.testing.assert_array_equal(got.view(np.uint8), want)


INTEGER_OPERATIONS = (
    *(
        "add",
        "subtract",
        "multiply",
        "divide",
        "remainder",
        "maximum",
        "minimum",
        "power",
        "and",
        "or",
        "xor",
    ),
    *("shift-left", "shift-right-arithmetic", "shift-right-logical"),
    *("not", "popcnt", "count-leading-zeros", "negate", "sign", "abs"),
)


@pytest.mark.parametrize("dtype", NARROW_INTEGERS)
def test_arithmetic_of_every_pair_of_integers(dtype):
    pairs = [v.ravel().copy() for v in np.meshgrid(every(dtype), every(dtype))]
    n, lines = pairs[0].size, []
    found = [o for o in INTEGER_OPERATIONS if not (dtype[0] == "u" and o in ("negate", "sign", "abs"))]
    for k, opcode in enumerate(found):
        operands = "a, b" if INTEGER_OPERATIONS.index(opcode) < 14 else "a"
        lines.append(f"  r{k} = {dtype}[{n}] {opcode}({operands})")
    results, shapes = ", ".join(f"r{k}" for k in range(len(lines))), ", ".join([f"{dtype}[{n}]"] * len(lines))
    text = f"HloModule m\nENTRY e {{\n  a = {dtype}[{n}] parameter(0)\n  b = {dtype}[{n}] parameter(1)\n"
    module = parse_module(text + "\n".join(lines) + f"\n  ROOT r = ({shapes}) tuple({results})\n}}")
    for opcode, got, want in zip(found, run_module(module, pairs), evaluate(module, pairs), strict=True):
        np.testing.assert_array_equal(got.astype(np.int32), want.astype(np.int32), err_msg=opcode)


def test_bits_of_other_types():
    text = """HloModule m
ENTRY e {
  a = f8e4m3fn[256] parameter(0)
  b = s8[256] bitcast-convert(a)
  c = f8e5m2[256] bitcast-convert(b)
  d = u4[256,2] bitcast-convert(b)
  f = s8[256] bitcast-convert(d)
  ROOT r = (s8[256], f8e5m2[256], u4[256,2], s8[256]) tuple(b, c, d, f)
}"""
    values = np.random.default_rng(1).permutation(every("f8e4m3fn"))
    bits, other, halves, whole = run_module(parse_module(text), [values])
    raw = values.view(np.uint8)
    np.testing.assert_array_equal(bits.view(np.uint8), raw)
    np.testing.assert_array_equal(other.view(np.uint8), raw)
    np.testing.assert_array_equal(halves.astype(np.int32), np.stack([raw & 15, raw >> 4], 1))
    np.testing.assert_array_equal(whole.view(np.uint8), raw)


@pytest.mark.parametrize("dtype", NARROW_FLOATS)
def test_the_table_of_formats_is_that_of_numpy(dtype):
    form, kind = NARROW_FLOATS[dtype], DTYPES[dtype].numpy
    largest = np.array([form.largest], np.uint8).view(kind).astype(np.float64)[0]
    with np.errstate(all="ignore"):
        finite = every(dtype).astype(np.float64)
    assert largest == np.max(finite[np.isfinite(finite)])
    nan = np.array([form.nan], np.uint8).view(kind).astype(np.float64)[0]
    assert np.isnan(nan) or (form.special == "finite" and nan == 0)


def native(function, *arguments, donated=()):
    """A fragment of these, compiled without anything left to XLA."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    fragment = fragment_of(function, *arguments, donated=donated)
    made = compile_fragments({"fragment": fragment}, {"mesh": mesh}, "native")["fragment"]
    assert not made.cost_analysis()["fallbacks"]
    return made


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("dtype", NARROW)
def test_arrays_of_jax_enter_and_leave(dtype):
    """XLA packs what is less than a byte; native code does not.  (XLA:CPU spoils memory with int2 itself.)"""

    def function(x):
        turned = x.T
        product = jnp.tanh(x.astype(jnp.float32)) @ jnp.ones((7, 9))
        return turned, product, jnp.where(turned == turned[:1], turned, turned[::-1])

    ones = np.resize(np.array([0, 1, 1, 0, 1, 1, 1, 0, 1]), (8, 7)).astype(np.int32)
    held = ones.astype(DTYPES[dtype].numpy)
    got = native(function, held)(jnp.array(held))
    assert [g.dtype for g in got] == [held.dtype, np.float32, held.dtype]
    x = held.astype(np.float32)
    want = (x.T, np.tanh(x) @ np.ones((7, 9)), np.where(x.T[:1] == x.T, x.T, x.T[::-1]))
    for mine, its in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(mine).astype(np.float32), its, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int4", "float8_e5m2"])
def test_a_donated_array_becomes_the_result(dtype):
    held = np.arange(-4, 4, dtype=np.int32).reshape(2, 4).astype(dtype)
    x = jnp.array(held)
    (got,) = native(lambda x: (x[::-1],), held, donated=(0,))(x)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), held[::-1].astype(np.float32))
    assert x.is_deleted()


@pytest.mark.parametrize("dtype", ["f8e4m3fn", "f8e5m2", "s4", "u4"])
def test_products_of_narrow_factors(dtype):
    """Exact: the factors are widened, and the sums are wide."""
    result = "f32" if DTYPES[dtype].is_floating else "s32"
    text = f"""HloModule m
ENTRY e {{
  a = {dtype}[33,70] parameter(0)
  b = {dtype}[70,17] parameter(1)
  ROOT r = {result}[33,17] dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}"""
    rng = np.random.default_rng(0)
    low = 0 if dtype == "u4" else -4
    a, b = (rng.integers(low, 8, dims).astype(np.int32) for dims in ((33, 70), (70, 17)))
    (got,) = run_module(parse_module(text), [v.astype(DTYPES[dtype].numpy) for v in (a, b)])
    np.testing.assert_array_equal(got, a @ b)


def test_reductions_by_computations_of_several_steps():
    """The largest element and its place, and the largest magnitude."""
    text = """HloModule m
larger {
  a = f8e4m3fn[] parameter(0)
  i = s32[] parameter(1)
  b = f8e4m3fn[] parameter(2)
  j = s32[] parameter(3)
  p = pred[] compare(a, b), direction=GE
  v = f8e4m3fn[] select(p, a, b)
  k = s32[] select(p, i, j)
  ROOT r = (f8e4m3fn[], s32[]) tuple(v, k)
}
magnitude {
  a = f8e4m3fn[] parameter(0)
  b = f8e4m3fn[] parameter(1)
  c = f8e4m3fn[] abs(a)
  d = f8e4m3fn[] abs(b)
  ROOT m = f8e4m3fn[] maximum(c, d)
}
ENTRY e {
  x = f8e4m3fn[5,9] parameter(0)
  n = s32[5,9] iota(), iota_dimension=1
  z = f8e4m3fn[] constant(-448)
  o = s32[] constant(0)
  w = f8e4m3fn[] constant(0)
  b = (f8e4m3fn[5], s32[5]) reduce(x, n, z, o), dimensions={1}, to_apply=larger
  v = f8e4m3fn[5] get-tuple-element(b), index=0
  k = s32[5] get-tuple-element(b), index=1
  h = f8e4m3fn[5] reduce(x, w), dimensions={1}, to_apply=magnitude
  ROOT r = (f8e4m3fn[5], s32[5], f8e4m3fn[5]) tuple(v, k, h)
}"""
    module = parse_module(text)
    x = np.random.default_rng(2).standard_normal((5, 9)).astype(DTYPES["f8e4m3fn"].numpy)
    for got, want in zip(run_module(module, [x]), evaluate(module, [x]), strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("dtype", NARROW_INTEGERS)
def test_the_high_bits_of_a_byte_are_zero(dtype):
    """An array given to others has no sign in them."""
    text = f"HloModule b\nENTRY main {{ a = s8[256] parameter(0)\n ROOT r = {dtype}[256] convert(a) }}"
    (found,) = run_module(parse_module(text), [np.arange(-128, 128).astype(np.int8)])
    assert (found.view(np.uint8) < 1 << DTYPES[dtype].bits).all()
