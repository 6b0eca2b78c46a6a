"""How kernels hold values of HLO's dtypes.

| dtype | in memory | in registers |
|---|---|---|
| pred | one byte, 0 or 1 | `int1` |
| s8 … s64, u8 … u64, f32, f64 | | the same |
| bf16, f16 | two bytes | `float32`, rounded after each operation |
| f8…, f4…, s4, u4, s2, u2 | one byte | the byte; `conversions.py` decodes it |
"""

from __future__ import annotations

import math

from mpmd.compile.kernels.operations import FLOATS, INTEGERS, NARROW, bits_of

MEMORY = {
    "pred": "uint8",
    **{name: f"{'int' if name[0] == 's' else 'uint'}{name[1:]}" for name in INTEGERS},
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    **dict.fromkeys(NARROW, "uint8"),
}
"""HLO dtype → Triton's name of the type in memory."""

HALF = ("bf16", "f16")
REGISTER = {**MEMORY, "pred": "int1", **dict.fromkeys(HALF, "float32")}
"""Likewise in registers."""

BITS = {name: int(name[1:]) for name in INTEGERS}


def pointer_type(dtype: str) -> str:
    """The type of a pointer to a dtype, as signatures of Triton name it: `*fp32`."""
    short = MEMORY[dtype].replace("uint", "u").replace("int", "i").replace("bfloat", "bf")
    return "*" + short.replace("float", "fp")


def from_memory(text: str, dtype: str) -> str:
    if dtype == "pred":
        return f"({text} != 0)"
    return f"{text}.to(tl.float32)" if dtype in HALF else text


def to_memory(text: str, dtype: str) -> str:
    return text if MEMORY[dtype] == REGISTER[dtype] else f"{text}.to(tl.{MEMORY[dtype]})"


def rounded(text: str, dtype: str) -> str:
    """The result of an operation: in registers, values of two bytes have more digits than their dtype."""
    return f"{text}.to(tl.{MEMORY[dtype]}).to(tl.float32)" if dtype in HALF else text


def literal(value: float | int | bool, dtype: str) -> str:
    if dtype in NARROW:
        return str(bits_of(value, dtype))
    if dtype in FLOATS:
        return repr(float(value)) if math.isfinite(value) else f"float('{float(value)}')"
    return str(int(value))


def constant(value: float | int | bool, dtype: str) -> str:
    return f"tl.full([1, 1], {literal(value, dtype)}, tl.{REGISTER[dtype]})"
