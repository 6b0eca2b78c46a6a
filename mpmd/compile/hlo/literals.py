"""Literals: values of constants as NumPy arrays, and their HLO text.

Text is exact: printing and reading a literal gives the same bits, NaN payloads included.
"""

from __future__ import annotations

import math
import re

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES, dtype_of
from mpmd.compile.hlo.instruction import Literal
from mpmd.compile.hlo.shape import Shape, array, tuple_of
from mpmd.compile.hlo.text import TextError, split_top
from mpmd.errors import HloError
from mpmd.support.memoisation import memoised

_PAIR = re.compile(r"\((?:[^()]|\([^()]*\))*\)|[^\s,()]+")
_NOT_FINITE = re.compile("inf|nan")
_PAYLOAD = re.compile(r"(-?)nan(?:\(0x([0-9a-fA-F]+)\))?$")
_BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
MANTISSA = {"f8e3m4": 4, "f8e4m3": 3, "f8e5m2": 2, "bf16": 7, "f16": 10, "f32": 23, "f64": 52}
"""Bits of the mantissa of types whose NaNs have a payload."""
_LONE_NAN = {
    "f8e4m3fn": (0x7F, 0xFF),
    "f8e4m3b11fnuz": (0x80, 0x80),
    "f8e4m3fnuz": (0x80, 0x80),
    "f8e5m2fnuz": (0x80, 0x80),
    "f8e8m0fnu": (0xFF, 0xFF),
}
"""Bits of `nan` and `-nan` in types whose NaNs have no payload, or no sign either."""


def literal_shape(literal: Literal) -> Shape:
    if isinstance(literal, tuple):
        return tuple_of([literal_shape(element) for element in literal])
    return array(dtype_of(literal), literal.shape)


def freeze(value: object, dtype: str | None) -> np.ndarray:
    """A read-only array for a literal.

    Raises:
        HloError: HLO has no such element type.
    """
    array = np.array(value, dtype=DTYPES[dtype].numpy if dtype else None)
    dtype_of(array)
    array.flags.writeable = False
    return array


# -- reading ----------------------------------------------------------------------------------------


def parse_literal(text: str, shape: Shape) -> Literal:
    """The value that `constant(text)` of this shape denotes.

    Raises:
        TextError: the text does not fit the shape.
    """
    if shape.is_scalar and len(text) < 40:
        return _parse_scalar(text, shape)
    if shape.is_tuple:
        body = text.strip()
        if body[:1] not in "({" or not body:
            raise TextError(f"expected a tuple such as (1, 2) of shape {shape}", 0)
        parts = split_top(body[1:-1])
        if len(parts) != len(shape.elements):
            raise TextError(
                f"the tuple has {len(parts)} elements, its shape {shape} has {len(shape.elements)}", 0
            )
        return tuple(parse_literal(part, element) for part, element in zip(parts, shape.elements))
    if not shape.is_array:
        raise TextError(f"a constant cannot have the shape {shape}", 0)
    return _parse_array(text, shape)


@memoised()
def _parse_scalar(text: str, shape: Shape) -> np.ndarray:
    return _parse_array(text, shape)


def _parse_array(text: str, shape: Shape) -> np.ndarray:
    body = text
    if "..." in body:
        raise TextError(
            f"the constant of shape {shape} was left out of the text; print the module with large constants",
            0,
        )
    if shape.dims and shape.info.kind != "complex" and shape.size and not re.search(r"[{},]", body.strip()):
        body = "".join([body, " 0" * (shape.size - 1)])  # as XLA reads it: the first element; zeros follow
    elif shape.dims:
        _check_braces(body, shape)
        body = body.replace("{", " ").replace("}", " ")
    kind = shape.info.kind
    if kind == "complex":
        tokens = _PAIR.findall(body)
    else:
        tokens = body.replace(",", " ").split()
    if len(tokens) != shape.size:
        raise TextError(f"the constant has {len(tokens)} values, its shape {shape} has {shape.size}", 0)
    try:
        values = _values(tokens, shape)
    except (ValueError, OverflowError) as error:
        raise TextError(f"a value of the constant is no {shape.dtype}: {error}", 0) from None
    array = values.reshape(shape.dims)
    array.flags.writeable = False
    return array


def _check_braces(text: str, shape: Shape) -> None:
    """The braces must nest as the dims do."""
    braces = "".join(re.findall(r"[{}]+", text))
    expected = ""
    for size in reversed(shape.dims):
        expected = "{" + expected * (size if expected else 1) + "}"
    empty = "{}" if 0 in shape.dims else expected
    if braces not in (expected, empty):
        raise TextError(f"the braces of the constant do not nest as its shape {shape} does", 0)


def _values(tokens: list[str], shape: Shape) -> np.ndarray:
    info = shape.info
    if info.kind == "pred":
        known = {"true": True, "false": False, "1": True, "0": False}
        wrong = next((t for t in tokens if t not in known), None)
        if wrong is not None:
            raise ValueError(f"expected true or false, got {wrong!r}")
        return np.array([known[t] for t in tokens], dtype=np.bool_)
    if info.kind in ("signed", "unsigned"):
        numbers = [int(t) for t in tokens]
        low, high = integer_range(shape.dtype)
        if shape.dtype == "u64":
            numbers = [n + (1 << 64) if -(1 << 63) <= n < 0 else n for n in numbers]
        wide = next((n for n in numbers if not low <= n <= high), None)
        if wide is not None:
            raise ValueError(f"{wide} is outside {low}..{high}")
        wider = np.uint64 if info.kind == "unsigned" else np.int64
        return np.array(numbers, dtype=wider).astype(info.numpy)
    if info.kind == "complex":
        part = "f32" if info.bits == 64 else "f64"
        return _floats([p for t in tokens for p in _complex(t)], part).view(info.numpy)
    return _floats(tokens, shape.dtype)


def _floats(tokens: list[str], dtype: str) -> np.ndarray:
    values = np.array([math.nan if "nan" in t else float(t) for t in tokens], dtype=np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = values.astype(DTYPES[dtype].numpy)
    for position, token in enumerate(tokens):
        if "nan" in token:
            _set_nan(out, position, token, dtype)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(out.astype(np.float64))
    wide = next((tokens[p] for p in np.flatnonzero(~finite) if not _NOT_FINITE.search(tokens[p])), None)
    if wide is not None:
        raise ValueError(f"{wide} is beyond its largest value")
    return out


def _complex(token: str) -> tuple[str, str]:
    """The real and the imaginary part of `(1, 2)`, or of `1`."""
    parts = [part.strip() for part in re.sub(r"^\(|\)$", "", token).split(",")]
    return parts[0], parts[1] if len(parts) > 1 else "0"


def _set_nan(out: np.ndarray, position: int, token: str, dtype: str) -> None:
    match = _PAYLOAD.match(token)
    if match is None:
        raise ValueError(f"expected nan or nan(0x...), got {token!r}")
    bits, mantissa = DTYPES[dtype].bits, MANTISSA.get(dtype)
    if mantissa is None:
        if match.group(2) or dtype not in _LONE_NAN:
            raise ValueError(f"{dtype} has no {token}")
        pattern = _LONE_NAN[dtype][bool(match.group(1))]
    else:
        payload = int(match.group(2), 16) if match.group(2) else 1 << (mantissa - 1)
        if not 0 < payload < 1 << mantissa:
            raise ValueError(f"the payload of {token} is outside 0x1..0x{(1 << mantissa) - 1:x}")
        exponent = ((1 << (bits - 1 - mantissa)) - 1) << mantissa
        pattern = (1 << (bits - 1) if match.group(1) else 0) | exponent | payload
    out.view(_BITS[bits])[position] = pattern


def integer_range(dtype: str) -> tuple[int, int]:
    info = DTYPES[dtype]
    if info.kind == "signed":
        return -(1 << (info.bits - 1)), (1 << (info.bits - 1)) - 1
    return 0, (1 << info.bits) - 1


# -- printing ---------------------------------------------------------------------------------------


def print_literal(literal: Literal) -> str:
    """The text between the parentheses of `constant(...)`."""
    if isinstance(literal, tuple):
        return "(" + ", ".join(print_literal(element) for element in literal) + ")"
    tokens = _tokens(literal)
    if not literal.ndim:
        return tokens[0]
    return _nested(tokens, literal.shape)


def _nested(tokens: list[str], dims: tuple[int, ...]) -> str:
    if 0 in dims:
        return "{" + "".join(_empty(dims[1:], dims[0])) + "}"
    parts = tokens
    for depth, size in enumerate(reversed(dims)):
        opened, closed = ("{", "}") if depth == 0 else ("{ ", " }")
        parts = [opened + ", ".join(parts[i : i + size]) + closed for i in range(0, len(parts), size)]
    return parts[0]


def _empty(dims: tuple[int, ...], count: int) -> str:
    inner = "{" + _empty(dims[1:], dims[0]) + "}" if dims else ""
    return ", ".join([inner] * count) if inner else ""


def _tokens(values: np.ndarray) -> list[str]:
    info = DTYPES[dtype_of(values)]
    flat = np.ascontiguousarray(values).reshape(-1)
    if info.kind == "pred":
        return ["true" if v else "false" for v in flat.tolist()]
    if info.kind in ("signed", "unsigned"):
        return [str(int(v)) for v in flat.tolist()]
    if info.kind == "complex":
        texts = _tokens(flat.view(np.float32 if info.bits == 64 else np.float64))
        return [f"({real}, {imaginary})" for real, imaginary in zip(texts[::2], texts[1::2])]
    wide = flat if info.bits == 64 else flat.astype(np.float32)
    texts = [_number(v) for v in wide]
    for position in np.flatnonzero(np.isnan(wide)):
        texts[position] = _nan_text(flat[position : position + 1], info.name)
    return texts


def _number(value: object) -> str:
    text = str(value)
    if text == "-0.0":  # XLA reads -0 as the integer
        return text
    return text[:-2] if text.endswith(".0") else text


def _nan_text(value: np.ndarray, dtype: str) -> str:
    bits = int(value.view(_BITS[DTYPES[dtype].bits])[0])
    sign = "-" if bits >> (DTYPES[dtype].bits - 1) and dtype != "f8e8m0fnu" else ""
    mantissa = MANTISSA.get(dtype)
    if mantissa is None:
        return f"{sign}nan"
    payload = bits & ((1 << mantissa) - 1)
    return f"{sign}nan" if payload == 1 << (mantissa - 1) else f"{sign}nan(0x{payload:x})"


def check_literal(literal: Literal, shape: Shape) -> str:
    """The mismatch between a literal and its shape; "" if there is none."""
    try:
        actual = literal_shape(literal)
    except HloError as error:
        return str(error)
    return "" if actual.logical is shape.logical else f"the literal has shape {actual.logical}"
