"""Element types of HLO arrays: one table from XLA's names to NumPy's types.

Names are XLA's (`f32`, `bf16`, `s32`, `pred`, ...).  NumPy lacks the narrow floats and integers; `ml_dtypes`
supplies them, so that every element type has a NumPy array form and arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from mpmd.errors import HloError

Kind = Literal["pred", "signed", "unsigned", "float", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: XLA's name, e.g. `bf16`.
        bits: width of a value; sub-byte types still take a byte each unless a layout packs them.
        kind: family of the type.
        numpy: the NumPy type with the same values.
    """

    name: str
    bits: int
    kind: Kind
    numpy: np.dtype

    @property
    def is_floating(self) -> bool:
        return self.kind == "float"

    @property
    def is_integral(self) -> bool:
        """True for signed and unsigned integers, not for `pred`."""
        return self.kind in ("signed", "unsigned")

    @property
    def bytes(self) -> int:
        """Bytes that one unpacked value takes."""
        return (self.bits + 7) // 8


def _table() -> dict[str, DType]:
    rows: list[tuple[str, int, Kind, Any]] = [
        ("pred", 8, "pred", np.bool_),
        ("s2", 2, "signed", ml_dtypes.int2),
        ("s4", 4, "signed", ml_dtypes.int4),
        ("s8", 8, "signed", np.int8),
        ("s16", 16, "signed", np.int16),
        ("s32", 32, "signed", np.int32),
        ("s64", 64, "signed", np.int64),
        ("u2", 2, "unsigned", ml_dtypes.uint2),
        ("u4", 4, "unsigned", ml_dtypes.uint4),
        ("u8", 8, "unsigned", np.uint8),
        ("u16", 16, "unsigned", np.uint16),
        ("u32", 32, "unsigned", np.uint32),
        ("u64", 64, "unsigned", np.uint64),
        ("f4e2m1fn", 4, "float", ml_dtypes.float4_e2m1fn),
        ("f8e3m4", 8, "float", ml_dtypes.float8_e3m4),
        ("f8e4m3", 8, "float", ml_dtypes.float8_e4m3),
        ("f8e4m3b11fnuz", 8, "float", ml_dtypes.float8_e4m3b11fnuz),
        ("f8e4m3fn", 8, "float", ml_dtypes.float8_e4m3fn),
        ("f8e4m3fnuz", 8, "float", ml_dtypes.float8_e4m3fnuz),
        ("f8e5m2", 8, "float", ml_dtypes.float8_e5m2),
        ("f8e5m2fnuz", 8, "float", ml_dtypes.float8_e5m2fnuz),
        ("f8e8m0fnu", 8, "float", ml_dtypes.float8_e8m0fnu),
        ("bf16", 16, "float", ml_dtypes.bfloat16),
        ("f16", 16, "float", np.float16),
        ("f32", 32, "float", np.float32),
        ("f64", 64, "float", np.float64),
        ("c64", 64, "complex", np.complex64),
        ("c128", 128, "complex", np.complex128),
    ]
    return {name: DType(name, bits, kind, np.dtype(numpy)) for name, bits, kind, numpy in rows}


DTYPES: dict[str, DType] = _table()
_BY_NUMPY: dict[np.dtype, DType] = {d.numpy: d for d in DTYPES.values()}


def dtype_of(array: np.ndarray | np.generic | np.dtype) -> str:
    """XLA's name for the element type of a NumPy array or scalar.

    Raises:
        HloError: HLO has no such element type (strings, objects, float128 ...).
    """
    numpy = array if isinstance(array, np.dtype) else array.dtype
    known = _BY_NUMPY.get(numpy)
    if known is None:
        raise HloError(f"NumPy type {numpy} has no HLO element type; known: {', '.join(DTYPES)}")
    return known.name
