"""LLVM types as text, typed values, and constants written exactly."""

from __future__ import annotations

import math
import struct
from functools import lru_cache

from mpmd.support.resources import memoised

FLOAT_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}


@lru_cache(maxsize=1024)
def vector(element: str, lanes: int) -> str:
    """The type of `lanes` elements, `<16 x float>`; a single lane is the element itself."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


@lru_cache(maxsize=1024)
def element_of(type_: str) -> str:
    """`float` of `<16 x float>`, and of `float`."""
    return type_[1:-1].split(" x ")[1] if type_.startswith("<") else type_


@lru_cache(maxsize=1024)
def lanes_of(type_: str) -> int:
    """`16` of `<16 x float>`, `1` of `float`."""
    return int(type_[1:].split(" x ")[0]) if type_.startswith("<") else 1


def is_float(type_: str) -> bool:
    """Whether the element is a floating-point type."""
    return element_of(type_) in FLOAT_BITS


def bits_of(type_: str) -> int:
    element = element_of(type_)
    return FLOAT_BITS[element] if element in FLOAT_BITS else int(element[1:])


@lru_cache(maxsize=1024)
def suffix(type_: str) -> str:
    """The spelling of a type in an intrinsic's name: `v16f32`, `f32`, `v8i64`."""
    element, lanes = element_of(type_), lanes_of(type_)
    short = "bf16" if element == "bfloat" else f"f{FLOAT_BITS[element]}" if element in FLOAT_BITS else element
    return short if lanes == 1 else f"v{lanes}{short}"


def integer_type(type_: str) -> str:
    """The integer type with the same bits and lanes: `<16 x i32>` of `<16 x float>`."""
    return vector(f"i{bits_of(type_)}", lanes_of(type_))


def with_element(type_: str, element: str) -> str:
    return vector(element, lanes_of(type_))


class Value:
    """An LLVM value: its text (`%v7`, `12`, `splat (float ...)`) and its type."""

    __slots__ = ("text", "type")

    def __init__(self, text: str, type_: str) -> None:
        self.text = text
        self.type = type_

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{self.type} {self.text}"

    @property
    def typed(self) -> str:
        """`type text`, the form operands take in most places."""
        return f"{self.type} {self.text}"


def _float_text(value: float, element: str) -> str:
    if element == "double":
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if element == "float":  # written as the double that equals it
        single = _round_to_single(value)
        return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"
    if element == "half":
        return f"0xH{_half_bits(value):04X}"
    return f"0xR{_bfloat_bits(value):04X}"


def _round_to_single(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _half_bits(value: float) -> int:
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00


def _bfloat_bits(value: float) -> int:
    bits = int(struct.unpack("<I", struct.pack("<f", _round_to_single(value)))[0])
    if math.isnan(value):
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


@memoised()
def _scalar_text(value: float | int, element: str, sign: float) -> str:
    if element == "ptr":
        return "null"
    if element in FLOAT_BITS:
        return _float_text(math.copysign(value, sign) if value == 0 else float(value), element)
    if element == "i1":
        return "true" if value else "false"
    bits = int(element[1:])
    wrapped = int(value) & ((1 << bits) - 1)
    return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)


def constant(value: float | int | bool, type_: str) -> Value:
    """A constant of a scalar or vector type; floats keep every bit, integers wrap to the type's width."""
    element = element_of(type_)
    text = _scalar_text(value, element, math.copysign(1.0, value))
    return Value(text if element == type_ else f"splat ({element} {text})", type_)


def vector_constant(values: list[int] | list[float], element: str) -> Value:
    texts = (f"{element} {_scalar_text(v, element, math.copysign(1.0, v))}" for v in values)
    type_ = vector(element, len(values))
    return Value(f"<{', '.join(texts)}>", type_) if len(values) > 1 else constant(values[0], element)
