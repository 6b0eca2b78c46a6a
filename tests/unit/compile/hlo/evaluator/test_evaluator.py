"""The evaluator where XLA leaves open what it computes."""

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.hlo.evaluator.values import convert, narrow
from tests.support.hlo_meaning import evaluate


def run(*lines: str, arguments=(), before: str = ""):
    text = "\n".join(["HloModule m", before, "ENTRY main {", *(f"  {line}" for line in lines), "}"])
    return evaluate(parse_module(text), list(arguments))


@pytest.mark.parametrize(
    ("opcode", "a", "b", "expected"),
    [
        ("divide", [7, -7, 5, -128], [2, 2, 0, -1], [3, -3, -1, -128]),
        ("remainder", [7, -7, 5, -128], [2, 2, 0, -1], [1, -1, 5, 0]),
        ("power", [2, -1, 0, 3], [-1, -3, -1, 5], [0, -1, 0, -13]),
        ("power", [3, -3, -2, 5], [127, 127, 127, 0], [-85, 85, 0, 1]),
        ("add", [127, -128, 1, 0], [1, -1, 1, 0], [-128, 127, 2, 0]),
        ("shift-left", [1, 1, 1, -1], [7, 8, -1, 1], [-128, 0, 0, -2]),
        ("shift-right-arithmetic", [-128, -128, 64, -1], [7, 9, 9, -1], [-1, -1, 0, -1]),
        ("shift-right-logical", [-128, -128, -1, 64], [7, 8, 1, 1], [1, 0, 127, 32]),
    ],
)
def test_integers_at_the_edges(opcode, a, b, expected):
    lines = ["a = s8[4]{0} parameter(0)", "b = s8[4]{0} parameter(1)", f"ROOT r = s8[4]{{0}} {opcode}(a, b)"]
    result = run(*lines, arguments=[np.array(a, np.int8), np.array(b, np.int8)])
    np.testing.assert_array_equal(result, np.array(expected, np.int8))


def test_powers_of_wide_integers_keep_all_bits():
    lines = ["a = u64[2]{0} parameter(0)", "b = u64[2]{0} parameter(1)", "ROOT r = u64[2]{0} power(a, b)"]
    result = run(*lines, arguments=[np.array([7, 3], np.uint64), np.array([22, 41], np.uint64)])
    np.testing.assert_array_equal(result, np.array([7**22, 3**41 % 2**64], np.uint64))


def test_unsigned_division_by_zero_gives_all_ones():
    lines = ["a = u8[2]{0} parameter(0)", "z = u8[2]{0} constant({0, 0})", "ROOT r = u8[2]{0} divide(a, z)"]
    np.testing.assert_array_equal(run(*lines, arguments=[np.array([5, 0], np.uint8)]), [255, 255])


def test_floats_to_integers_saturate():
    values = np.array([np.nan, np.inf, -np.inf, 300.7, -300.7, 2.9, -2.9, 127.99], np.float32)
    np.testing.assert_array_equal(convert(values, "f32", "s8"), [0, 127, -128, 127, -128, 2, -2, 127])
    np.testing.assert_array_equal(convert(values, "f32", "u8"), [0, 255, 0, 255, 0, 2, 0, 127])
    edges = np.array([9.3e18, -9.3e18, 2.0**62], np.float64)
    np.testing.assert_array_equal(convert(edges, "f64", "s64"), [2**63 - 1, -(2**63), 2**62])
    np.testing.assert_array_equal(convert(np.array([-8, 9], np.int32), "s32", "s4").astype(int), [-8, -7])


def test_one_rounding_from_f64_to_narrow_floats():
    above_tie = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40], np.float64)
    np.testing.assert_array_equal(narrow(above_tie, "bf16").astype(np.float64), [1 + 2.0**-7, 1.0])
    assert narrow(np.float64(1 + 2.0**-8), "bf16").astype(np.float64) == 1.0


@pytest.mark.parametrize(("dtype", "bits"), [("s32", 32), ("u32", 32), ("s8", 8), ("u64", 64)])
def test_mulhi_is_the_upper_half_of_the_product(dtype, bits):
    rng = np.random.default_rng(0)
    numpy = np.dtype(f"{'i' if dtype[0] == 's' else 'u'}{bits // 8}")
    a, b = (np.frombuffer(rng.bytes(8 * bits // 8), numpy) for _ in range(2))
    made = run(f"a = {dtype}[8] parameter(0)", f"b = {dtype}[8] parameter(1)", f"r = {dtype}[8] mulhi(a, b)",
               arguments=[a, b])  # fmt: skip
    assert made.tolist() == [(int(x) * int(y)) >> bits for x, y in zip(a, b)]
