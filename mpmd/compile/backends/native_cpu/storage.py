"""How arrays hold values, and how kernels compute with them.

| dtype | in memory | in registers |
|---|---|---|
| pred | one byte, 0 or 1 | `i1` |
| s8 … s64, u8 … u64 | `i8` … `i64` | the same; signedness is the operation's |
| bf16 | 16 bits | `float` |
| f16 | `half` | `float` |
| f32, f64 | `float`, `double` | the same |
| f8…, f4…, s4, u4, s2, u2 | one byte | the byte; `narrow.py` converts it |
"""

from __future__ import annotations

from mpmd.compile.kernels.narrow import NARROW, bits_of
from mpmd.compile.llvm.builder import FunctionBuilder, Index
from mpmd.compile.llvm.types import (
    Value,
    constant,
    element_of,
    lanes_of,
    vector,
    with_element,
)
from mpmd.errors import CompileError

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
