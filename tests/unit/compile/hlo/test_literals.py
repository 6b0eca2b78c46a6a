"""Constants as text: the same bits after printing and reading, and XLA reads the same."""

import re

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module, print_module
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.literals import freeze, parse_literal, print_literal
from mpmd.compile.hlo.shape import array
from mpmd.compile.hlo.text import TextError

NARROW = [d.name for d in DTYPES.values() if d.name.startswith("f8")]


def every_pattern(dtype: str) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(DTYPES[dtype].numpy)


def special_patterns(dtype: str) -> np.ndarray:
    """Both zeros, both infinities, NaNs of both signs with the smallest, usual and largest payload."""
    mantissa, bits, unsigned = {
        "bf16": (7, 16, np.uint16),
        "f16": (10, 16, np.uint16),
        "f32": (23, 32, np.uint32),
        "f64": (52, 64, np.uint64),
    }[dtype]
    infinity = ((1 << (bits - 1 - mantissa)) - 1) << mantissa
    positive = [0, 1, infinity, infinity | 1, infinity | 1 << (mantissa - 1), infinity | (1 << mantissa) - 1]
    patterns = [sign << (bits - 1) | pattern for sign in (0, 1) for pattern in positive]
    return np.array(patterns, unsigned).view(DTYPES[dtype].numpy)


def round_trip(values: np.ndarray, dtype: str) -> np.ndarray:
    return parse_literal(print_literal(values), array(dtype, values.shape))


@pytest.mark.parametrize("dtype", NARROW)
def test_every_bit_pattern_of_eight_bits_survives(dtype):
    values = every_pattern(dtype)
    assert round_trip(values, dtype).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_zeros_infinities_and_nans_survive(dtype):
    values = special_patterns(dtype)
    assert round_trip(values, dtype).tobytes() == values.tobytes()


@pytest.mark.parametrize(("dtype", "part"), [("c64", "f32"), ("c128", "f64")])
def test_both_parts_of_complex_numbers_survive(dtype, part):
    values = np.stack([special_patterns(part), special_patterns(part)[::-1]], axis=-1)
    values = np.ascontiguousarray(values).view(DTYPES[dtype].numpy)
    assert round_trip(values, dtype).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", NARROW)
def test_xla_writes_the_same_nans(dtype, xla):
    values = every_pattern(dtype)
    text = f"HloModule m\n\nENTRY e {{\n  ROOT c = {dtype}[256]{{0}} constant({print_literal(values)})\n}}\n"
    theirs = xla.parse(text)
    assert nans(theirs) == nans(text) and nans(text)
    again, kept = parse_module(theirs).entry.root.literal, np.isnan(values)
    assert again[kept].tobytes() == values[kept].tobytes()
    assert nans(print_module(parse_module(theirs))) == nans(text)


def nans(text: str) -> list[str]:
    return re.findall(r"-?nan(?:\(0x[0-9a-f]+\))?", text)


@pytest.mark.parametrize(
    ("dtype", "token", "problem"),
    [
        ("f8e4m3fn", "nan(0x1)", "f8e4m3fn has no nan"),
        ("f8e5m2", "nan(0x4)", r"payload of nan\(0x4\) is outside 0x1..0x3"),
        ("f32", "nan(0x0)", "payload"),
        ("f4e2m1fn", "nan", "f4e2m1fn has no nan"),
        ("f32", "nan(1)", "expected nan or nan"),
    ],
)
def test_a_nan_that_the_type_lacks_is_refused(dtype, token, problem):
    with pytest.raises(TextError, match=problem):
        parse_literal(token, array(dtype))


def test_a_frozen_scalar_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        freeze(1.0, "f32")[()] = 2
