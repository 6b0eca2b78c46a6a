"""The text of MLIR's dense constants: `dense<[1.5, 2.5]> : tensor<2xbf16>`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import narrow
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import CompileError

_BODY = re.compile(r'dense<(?:"0x([0-9A-Fa-f]*)"|([^>]*))>')
_TOKEN = re.compile(r"\([^()]*\)|[^\s,\[\]()]+")


def parse_dense(text: str, shape: Shape) -> np.ndarray:
    """The array of a dense constant of this shape; a single value is repeated.

    Raises:
        CompileError: the text is not a dense constant, or was shortened.
    """
    found = _BODY.match(text)
    if found is None:
        raise CompileError(f"expected a dense constant of shape {shape}, got {text[:60]!r}")
    if found.group(1) is not None:
        return _from_bytes(bytes.fromhex(found.group(1)), shape)
    tokens = _TOKEN.findall(found.group(2))
    if any("..." in t for t in tokens):
        raise CompileError(
            f"the constant of shape {shape} was left out of the text\n  print the module with large constants"
        )
    if not tokens:
        return np.zeros(shape.dims, shape.numpy_dtype)
    values = _values(tokens, shape)
    if len(tokens) == 1:
        return np.broadcast_to(values.reshape(()), shape.dims)
    return values.reshape(shape.dims)


def _from_bytes(data: bytes, shape: Shape) -> np.ndarray:
    """Raw memory: booleans as bytes or packed bits, narrow integers as bytes, one element for all."""
    raw = np.frombuffer(data, np.uint8)
    if shape.dtype == "pred":
        whole = (
            raw != 0 if len(raw) in (1, shape.size) else np.unpackbits(raw, bitorder="little")[: shape.size]
        )
        values = whole.astype(np.bool_)
    elif shape.info.is_integral and shape.info.bits < 8:
        values = narrow(raw.astype(np.int64), shape.dtype)
    else:
        values = np.frombuffer(data, shape.numpy_dtype)
    if len(values) not in (1, shape.size):
        raise CompileError(
            f"a constant of shape {shape} has {len(values)} values\n  expected: one, or {shape.size}"
        )
    return np.broadcast_to(values.reshape(()), shape.dims) if len(values) == 1 else values.reshape(shape.dims)


def _values(tokens: list[str], shape: Shape) -> np.ndarray:
    info = shape.info
    if info.kind == "pred":
        return np.array([t in ("true", "1", "-1") for t in tokens])
    if info.is_integral:
        mask = (1 << info.bits) - 1
        wrapped = [int(t, 0) & mask for t in tokens]
        return narrow(np.array(wrapped, np.uint64).astype(np.int64), shape.dtype).astype(info.numpy)
    if info.kind == "complex":
        part = "f32" if shape.dtype == "c64" else "f64"
        pairs = [[_float(p.strip(), part) for p in t[1:-1].split(",")] for t in tokens]
        return np.array([complex(float(re_), float(im)) for re_, im in pairs], info.numpy)
    return np.array([_float(t, shape.dtype) for t in tokens], info.numpy)


def _float(token: str, dtype: str) -> Any:
    """A number, or its bits in hexadecimal (how infinities and NaN are written)."""
    info = DTYPES[dtype]
    if token.startswith("0x"):
        raw = int(token, 16).to_bytes(info.bytes, "little")
        return np.frombuffer(raw, info.numpy)[0]
    return np.asarray(narrow(np.asarray(float(token), np.float64), dtype))[()]
