"""How Triton kernels hold values of HLO's dtypes, and conversions between them.

| dtype | in memory | in registers |
|---|---|---|
| pred | one byte, 0 or 1 | `int1` |
| s8 … s64, u8 … u64, f32, f64 | | the same |
| bf16, f16 | two bytes | `float32`, rounded after each operation |
| f8…, f4…, s4, u4, s2, u2 | one byte | the byte, which each operation decodes |

    to integers   towards zero, saturating; NaN gives 0
    to bf16, f16  to the nearest, ties to even
    f8… -> f32    exact;   f32 -> f8…   to the nearest, ties to even, once
    s4 -> s8      exact;   s8 -> s4     the low bits

Types of a byte or less are converted with integer operations: not every GPU has instructions for them.
"""

from __future__ import annotations

import math

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.kernels.operations import FLOATS, INTEGERS, NARROW, NARROW_FLOATS, NARROW_INTEGERS, bits_of

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


CONVERSIONS = '''
@triton.jit
def decoded(raw, exponent: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr, special: tl.constexpr):
    """Bytes of a narrow float as float32."""
    bits = raw.to(tl.uint32)
    if special == "scale":
        moved = tl.where(bits == 0, 1 << 22, bits << 23)
        return tl.where(bits == 255, 0x7FC00000, moved).to(tl.uint32).to(tl.float32, bitcast=True)
    sign = 1 << (exponent + mantissa)
    magnitude = bits & (sign - 1)
    normal = (magnitude << (23 - mantissa)) + ((127 - bias) << 23)
    tiny = (magnitude.to(tl.float32) * (2.0 ** (1 - bias - mantissa))).to(tl.uint32, bitcast=True)
    found = tl.where(magnitude < (1 << mantissa), tiny, normal)
    if special == "ieee":
        infinity = sign - (1 << mantissa)
        found = tl.where(magnitude > infinity, 0x7FC00000, tl.where(magnitude == infinity, 0x7F800000, found))
    if special == "fn":
        found = tl.where(magnitude == sign - 1, 0x7FC00000, found)
    signed = found.to(tl.uint32) | ((bits & sign) << (31 - exponent - mantissa))
    if special == "fnuz":
        signed = tl.where(bits == sign, 0x7FC00000, signed).to(tl.uint32)
    return signed.to(tl.float32, bitcast=True)

@triton.jit
def encoded(x, exponent: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr, special: tl.constexpr,
            largest: tl.constexpr, beyond: tl.constexpr, nan: tl.constexpr):
    """float32 as bytes of a narrow float."""
    bits = x.to(tl.uint32, bitcast=True)
    if special == "scale":
        lifted = bits + (1 << 22) - (bits < (1 << 23)).to(tl.uint32)
        positive = (bits != 0) & (bits < 0x7F800000)
        return tl.where(positive, lifted >> 23, nan).to(tl.uint8)
    magnitude = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - mantissa
    lifted = magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
    normal = (lifted >> dropped) - ((127 - bias) << mantissa)
    beside = tl.full([1, 1], 2.0 ** (24 - bias - mantissa), tl.float32)
    tiny = (magnitude.to(tl.float32, bitcast=True) + beside).to(tl.uint32, bitcast=True)
    tiny = tiny - beside.to(tl.uint32, bitcast=True)
    made = tl.where(magnitude < ((128 - bias) << 23), tiny, normal)
    made = tl.where(made > largest, beyond, made)
    is_nan = magnitude > 0x7F800000
    made = tl.where(is_nan, nan, made).to(tl.uint32)
    signed = made | ((bits >> (31 - exponent - mantissa)) & (1 << (exponent + mantissa)))
    if special == "fnuz":
        signed = tl.where(made == 0, made, signed)
    if special == "finite":
        signed = tl.where(is_nan, made, signed)
    return signed.to(tl.uint8)
'''


def convert(text: str, source: str, target: str) -> str:
    if source == target:
        return text
    if source in NARROW:
        return convert(_widened(text, source), _wide_dtype(source), target)
    if source in FLOATS and target in (*BITS, *NARROW_INTEGERS):
        whole = _to_integer(text, target)
        return _narrowed(whole, target) if target in NARROW else whole
    if target in NARROW:
        return _narrowed(convert(text, source, _wide_dtype(target)), target)
    if target == "pred":
        return f"({text} != 0)"
    if target in HALF:
        direct = REGISTER[source] == "float32" or (source, target) == ("f64", "f16")
        return rounded(text if direct else f"{text}.to(tl.float32)", target)
    return text if REGISTER[source] == REGISTER[target] else f"{text}.to(tl.{REGISTER[target]})"


def bitcast(text: str, source: str, target: str) -> str:
    """The bits of a value as another dtype of the same size."""
    raw = to_memory(text, source)
    if MEMORY[source] != MEMORY[target]:
        raw = f"{raw}.to(tl.{MEMORY[target]}, bitcast=True)"
    return raw if MEMORY[target] == REGISTER[target] else f"{raw}.to(tl.{REGISTER[target]})"


def _to_integer(text: str, target: str) -> str:
    """A float as the nearest integer towards zero that a dtype holds; for a narrow dtype, in a byte."""
    bits, unsigned = DTYPES[target].bits, target[0] == "u"
    low, high = (0, (1 << bits) - 1) if unsigned else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    kind = f"tl.{REGISTER[_wide_dtype(target) if target in NARROW else target]}"
    inside = f"tl.where(({text} > {float(low)}) & ({text} < {float(high)}), {text}, 0.0).to({kind})"
    above, below = (f"tl.full([1, 1], {number}, {kind})" for number in (high, low))
    return f"tl.where({text} >= {float(high)}, {above}, tl.where({text} <= {float(low)}, {below}, {inside}))"


def _wide_dtype(narrow: str) -> str:
    """The dtype that holds every value of a narrow one."""
    return "f32" if narrow in NARROW_FLOATS else f"{narrow[0]}8"


def _widened(text: str, source: str) -> str:
    if source in NARROW_FLOATS:
        form = NARROW_FLOATS[source]
        return f"decoded({text}, {form.exponent}, {form.mantissa}, {form.bias}, {form.special!r})"
    assert source in NARROW_INTEGERS
    spare = 8 - DTYPES[source].bits
    if source[0] == "u":
        return f"({text} & {0xFF >> spare})"
    return f"(({text} << {spare}).to(tl.int8, bitcast=True) >> {spare})"


def _narrowed(text: str, target: str) -> str:
    if target in NARROW_FLOATS:
        form = NARROW_FLOATS[target]
        shape = f"{form.exponent}, {form.mantissa}, {form.bias}, {form.special!r}"
        return f"encoded({text}, {shape}, {form.largest}, {form.beyond}, {form.nan})"
    return f"({text}.to(tl.uint8, bitcast=True) & {0xFF >> (8 - DTYPES[target].bits)})"
