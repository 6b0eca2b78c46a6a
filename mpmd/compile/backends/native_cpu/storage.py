"""How arrays hold values, and how kernels compute with them.

| dtype | in memory | in registers |
|---|---|---|
| pred | one byte, 0 or 1 | `i1` |
| s8 … s64, u8 … u64 | `i8` … `i64` | the same; signedness is the operation's |
| bf16 | 16 bits | `float` |
| f16 | `half` | `float` |
| f32, f64 | `float`, `double` | the same |
| f8…, f4…, s4, u4, s2, u2 | one byte | the byte, which each operation widens |

    widened:   f8 -> f32    s4 -> s8    u4 -> u8      exact
    narrowed:  f32 -> f8    to the nearest, ties to even, once
               s8 -> s4     the low bits

Narrow types are converted with integers and one addition, so that denormals of f32, which threads of XLA
flush, matter only in `f8e8m0fnu`, whose smallest number is one.
"""

from __future__ import annotations

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.kernels.operations import NARROW, NARROW_FLOATS, NarrowFloat, bits_of
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index
from mpmd.compile.llvm.llvm_types import Value, constant, element_of, lanes_of, vector, with_element
from mpmd.errors import CompileError

_MANTISSA, _BIAS = 23, 127  # of f32
_INFINITY, _NAN, _SIGN = 0x7F800000, 0x7FC00000, 1 << 31


def widened(f: FunctionBuilder, raw: Value, dtype: str) -> tuple[Value, str]:
    """Bytes of a narrow type as f32, s8 or u8, and which of them; their unused bits may be anything."""
    if dtype in NARROW_FLOATS:
        bits = f.cast("zext", raw, with_element(raw.type, "i32"))
        return f.from_bits(_float_bits(f, bits, NARROW_FLOATS[dtype]), "float"), "f32"
    info = DTYPES[dtype]
    if info.kind == "unsigned":
        return _kept(f, raw, dtype), "u8"
    return f.ashr(f.shl(raw, 8 - info.bits), 8 - info.bits), "s8"


def _float_bits(f: FunctionBuilder, bits: Value, form: NarrowFloat) -> Value:
    """The bits of the f32 that equals a narrow float."""
    type_ = bits.type
    if form.special == "scale":
        moved = f.shl(bits, _MANTISSA)
        least = f.compare("eq", bits, constant(0, type_))  # 2**-127 is a denormal
        moved = f.select(least, constant(1 << (_MANTISSA - 1), type_), moved)
        return f.select(f.compare("eq", bits, constant(form.nan, type_)), constant(_NAN, type_), moved)
    magnitude = f.and_(bits, constant(form.sign - 1, type_))
    scaled = f.shl(magnitude, _MANTISSA - form.mantissa)
    normal = f.add(scaled, constant((_BIAS - form.bias) << _MANTISSA, type_))
    unit = constant(2.0 ** (1 - form.bias - form.mantissa), with_element(type_, "float"))
    tiny = f.as_bits(f.mul(f.cast("sitofp", magnitude, unit.type), unit))
    wide = f.select(f.compare("ult", magnitude, constant(1 << form.mantissa, type_)), tiny, normal)
    if form.special == "ieee":
        infinite = f.compare("eq", magnitude, constant(form.largest + 1, type_))
        beyond = f.select(infinite, constant(_INFINITY, type_), constant(_NAN, type_))
        wide = f.select(f.compare("ugt", magnitude, constant(form.largest, type_)), beyond, wide)
    elif form.special == "fn":
        wide = f.select(f.compare("eq", magnitude, constant(form.nan, type_)), constant(_NAN, type_), wide)
    sign = f.and_(bits, constant(form.sign, type_))
    signed = f.or_(wide, f.shl(sign, 31 - form.exponent - form.mantissa))
    if form.special == "fnuz":
        low = f.and_(bits, constant(0xFF, type_))
        signed = f.select(f.compare("eq", low, constant(form.nan, type_)), constant(_NAN, type_), signed)
    return signed


def narrowed(f: FunctionBuilder, value: Value, dtype: str) -> Value:
    """F32 values as bytes of a narrow float, or the low bits of bytes as a narrow integer."""
    if dtype not in NARROW_FLOATS:
        return _kept(f, value, dtype)
    form, bits = NARROW_FLOATS[dtype], f.as_bits(value)
    result = _scale_bits(f, bits, form) if form.special == "scale" else _rounded(f, bits, form)
    return f.cast("trunc", result, with_element(value.type, "i8"))


def _kept(f: FunctionBuilder, raw: Value, dtype: str) -> Value:
    return f.and_(raw, constant((1 << DTYPES[dtype].bits) - 1, raw.type))


def _rounded(f: FunctionBuilder, bits: Value, form: NarrowFloat) -> Value:
    type_ = bits.type
    magnitude = f.and_(bits, constant(_SIGN - 1, type_))
    dropped = _MANTISSA - form.mantissa
    last = f.and_(f.lshr(magnitude, dropped), constant(1, type_))
    lifted = f.add(f.add(magnitude, constant((1 << (dropped - 1)) - 1, type_)), last)
    normal = f.sub(f.lshr(lifted, dropped), constant((_BIAS - form.bias) << form.mantissa, type_))
    # beside this number the neighbours of a f32 are as far apart as denormals are
    beside = constant(2.0 ** (_MANTISSA + 1 - form.bias - form.mantissa), with_element(type_, "float"))
    total = f.add(f.from_bits(magnitude, "float"), beside)
    tiny = f.sub(f.as_bits(total), f.as_bits(beside))
    smallest = constant((_BIAS + 1 - form.bias) << _MANTISSA, type_)
    result = f.select(f.compare("ult", magnitude, smallest), tiny, normal)
    over = f.compare("ugt", result, constant(form.largest, type_))
    result = f.select(over, constant(form.beyond, type_), result)
    is_nan = f.compare("ugt", magnitude, constant(_INFINITY, type_))
    result = f.select(is_nan, constant(form.nan, type_), result)
    sign = f.and_(f.lshr(bits, 31 - form.exponent - form.mantissa), constant(form.sign, type_))
    signed = f.or_(result, sign)
    if form.special == "fnuz":  # one zero
        return f.select(f.compare("eq", result, constant(0, type_)), result, signed)
    return f.select(is_nan, result, signed) if form.special == "finite" else signed


def _scale_bits(f: FunctionBuilder, bits: Value, form: NarrowFloat) -> Value:
    """Powers of two: ties go up, as do denormals above the smallest power."""
    type_ = bits.type
    denormal = f.cast("zext", f.compare("ult", bits, constant(1 << _MANTISSA, type_)), type_)
    lifted = f.sub(f.add(bits, constant(1 << (_MANTISSA - 1), type_)), denormal)
    power = f.lshr(lifted, _MANTISSA)
    positive = f.compare("ult", f.sub(bits, constant(1, type_)), constant(_INFINITY - 1, type_))
    return f.select(positive, power, constant(form.nan, type_))


def to_odd(f: FunctionBuilder, value: Value) -> Value:
    """F64 as f32, such that a second rounding gives the result of one: inexact values end in a one."""
    single = f.cast("fptrunc", value, with_element(value.type, "float"))
    back = f.cast("fpext", single, value.type)
    bits = f.as_bits(single)
    larger = f.compare("ogt", f.fabs(back), f.fabs(value))
    lowered = f.sub(bits, f.cast("zext", larger, bits.type))
    odd = f.or_(lowered, constant(1, bits.type))
    return f.from_bits(f.select(f.compare("one", back, value), odd, bits), "float")


MEMORY = {
    "pred": "i8",
    "s8": "i8",
    "u8": "i8",
    "s16": "i16",
    "u16": "i16",
    "s32": "i32",
    "u32": "i32",
    "s64": "i64",
    "u64": "i64",
    "bf16": "i16",
    "f16": "half",
    "f32": "float",
    "f64": "double",
    **dict.fromkeys(NARROW, "i8"),
}
REGISTER = {**MEMORY, "pred": "i1", "bf16": "float", "f16": "float"}
BYTES = {
    dtype: {"i8": 1, "i16": 2, "half": 2, "i32": 4, "float": 4, "i64": 8, "double": 8}[element]
    for dtype, element in MEMORY.items()
}


def check_dtype(dtype: str) -> None:
    """Refuse arrays that the CPU backend cannot hold.

    Raises:
        CompileError: a dtype outside of the table above.
    """
    if dtype not in MEMORY:
        raise CompileError(f"the native CPU backend has no {dtype}; it has {', '.join(MEMORY)}")


def register_constant(value: float | int | bool, dtype: str) -> Value:
    return constant(bits_of(value, dtype) if dtype in NARROW else value, REGISTER[dtype])


def load(
    f: FunctionBuilder, pointer: Value, dtype: str, lanes: int, index: Index = 0, mask: Value | None = None
) -> Value:
    """Load adjacent elements as register values; masked lanes are zero and not touched.

    Args:
        f: where the code goes.
        pointer: start of an array.
        dtype: of its elements.
        lanes: how many.
        index: number of the first.
        mask: lanes to load, or None for all.
    """
    type_ = vector(MEMORY[dtype], lanes)
    raw = f.load(pointer, type_, index) if mask is None else f.masked_load(pointer, type_, mask, index)
    return widen(f, raw, dtype)


def store(
    f: FunctionBuilder,
    value: Value,
    pointer: Value,
    dtype: str,
    index: Index = 0,
    mask: Value | None = None,
    *,
    streams: bool = False,
) -> None:
    """Store register values as adjacent elements; see `load`, and `FunctionBuilder.store` for `streams`."""
    raw = narrow(f, value, dtype)
    if streams and dtype == "bf16":
        raw = f.sealed(raw)  # LLVM merges rounding into the store, and cannot select a non-temporal one
    if mask is None:
        f.store(raw, pointer, index, streams=streams)
    else:
        f.masked_store(raw, pointer, mask, index)


def widen(f: FunctionBuilder, raw: Value, dtype: str) -> Value:
    if dtype == "pred":
        return f.compare("ne", raw, constant(0, raw.type))
    if dtype == "bf16":
        return f.record_narrow(_upper_halves(f, raw), raw)
    return f.cast("fpext", raw, with_element(raw.type, "float")) if dtype == "f16" else raw


def _upper_halves(f: FunctionBuilder, raw: Value) -> Value:
    """Floats whose upper halves are these bits.

    Two instructions; the first is part of a load.  One that picks halves from two vectors needs what
    multiplies, which is what there is least of.
    """
    bits = f.shl(f.cast("zext", raw, with_element(raw.type, "i32")), 16)
    return f.from_bits(bits, "float")


def narrow(f: FunctionBuilder, value: Value, dtype: str) -> Value:
    """Register values as elements to be stored; a value widened from such elements is not rounded again."""
    if dtype == "pred":
        return f.cast("zext", value, with_element(value.type, "i8"))
    if dtype == "bf16":
        return f.narrow_of(value) or _bf16_bits(f, value)
    return f.cast("fptrunc", value, with_element(value.type, "half")) if dtype == "f16" else value


def _bf16_bits(f: FunctionBuilder, value: Value) -> Value:
    """The nearest bf16 of floats, ties to even, as 16-bit integers; NaN stays NaN.

    The instruction for it flushes denormals; so does every thread of XLA that calls native code.
    """
    short = with_element(value.type, "i16")
    if f.target.bf16_dot and lanes_of(value.type) > 1:
        rounded = f.cast("fptrunc", value, with_element(value.type, "bfloat"))
        return f.cast("bitcast", rounded, short)
    bits = f.as_bits(value)
    odd = f.and_(f.lshr(bits, 16), constant(1, bits.type))
    rounded = f.add(f.add(bits, constant(0x7FFF, bits.type)), odd)
    quiet = f.or_(bits, constant(0x400000, bits.type))
    kept = f.select(f.compare("uno", value, value), quiet, rounded)
    return f.cast("trunc", f.lshr(kept, 16), short)


def round_to(f: FunctionBuilder, value: Value, dtype: str) -> Value:
    """A register value rounded to what `dtype` can hold, still in the register type."""
    if dtype in ("bf16", "f16") and element_of(value.type) == "float":
        return widen(f, narrow(f, value, dtype), dtype)
    return value
