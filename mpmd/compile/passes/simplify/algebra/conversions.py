"""Rules of element types: convert, bitcast-convert, reduce-precision, copy.

All are exact: a conversion is dropped only if it kept every value.
"""

from __future__ import annotations

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule

_FLOATS = {
    # stored mantissa bits, smallest and largest exponent of normal numbers
    "f8e5m2": (2, -14, 15),
    "f8e4m3": (3, -6, 7),
    "f8e3m4": (4, -2, 3),
    "bf16": (7, -126, 127),
    "f16": (10, -14, 15),
    "f32": (23, -126, 127),
    "f64": (52, -1022, 1023),
}

_FINITE = {
    # the same of floats without infinities: only their own numbers convert to one of them without loss
    "f4e2m1fn": (1, 0, 2),
    "f8e4m3b11fnuz": (3, -10, 4),
    "f8e4m3fn": (3, -6, 8),
    "f8e4m3fnuz": (3, -7, 7),
    "f8e5m2fnuz": (2, -15, 15),
}


def is_lossless(source: str, target: str) -> bool:
    """True if every value of one element type is a value of the other."""
    if source == target or source == "pred":
        return True
    a, b = DTYPES[source], DTYPES[target]
    if b.kind == "complex":
        part = "f32" if target == "c64" else "f64"
        return source == "c64" if a.kind == "complex" else is_lossless(source, part)
    if a.is_integral and b.is_integral:
        if a.kind == b.kind:
            return a.bits <= b.bits
        return a.kind == "unsigned" and a.bits < b.bits
    if a.is_integral and target in _FLOATS:
        digits = a.bits - (a.kind == "signed")
        mantissa, _, largest = _FLOATS[target]
        return digits <= mantissa + 1 and digits <= largest
    if (source in _FLOATS or source in _FINITE) and target in _FLOATS:
        m, low, high = _FLOATS.get(source) or _FINITE[source]
        wide, lowest, highest = _FLOATS[target]
        # Numbers below the smallest normal one need room, too.
        return m <= wide and high <= highest and low - m >= lowest - wide and (low >= lowest)
    return False


def convert_twice(site: RewriteSite) -> HloInstruction | None:
    """convert(convert(x)) → convert(x), where the first conversion kept every value."""
    (inner,) = site.operands
    if inner.opcode != "convert":
        return None
    (x,) = inner.operands
    if not is_lossless(x.shape.dtype, inner.shape.dtype):
        return None
    return site.build.convert(x, site.shape.dtype)


def convert_broadcast(site: RewriteSite) -> HloInstruction | None:
    """convert(broadcast(x)) → broadcast(convert(x))."""
    (inner,) = site.operands
    if inner.opcode != "broadcast" or inner.operands[0].shape.size >= inner.shape.size:
        return None
    x = site.build.convert(inner.operands[0], site.shape.dtype)
    return site.build.broadcast(x, site.shape.dims, inner.dimensions)


def convert_iota(site: RewriteSite) -> HloInstruction | None:
    """convert(iota) → iota, where all its values exist in both types."""
    (inner,) = site.operands
    if inner.opcode != "iota" or not inner.shape.info.is_integral:
        return None
    top = inner.shape.dims[inner.iota_dimension] - 1
    target = site.shape.info
    if target.is_integral:
        fits = top < 1 << (target.bits - 1)
    else:
        fits = site.shape.dtype in _FLOATS and top <= 2 << _FLOATS[site.shape.dtype][0]
        fits = fits and top < 1 << _FLOATS[site.shape.dtype][2]
    if not fits or top >= 1 << (inner.shape.info.bits - 1):
        return None
    return site.build.iota(site.shape.dtype, site.shape.dims, inner.iota_dimension)


def copy_nothing(site: RewriteSite) -> HloInstruction | None:
    """A copy to the same layout → its operand; a copy of a copy → one copy."""
    (x,) = site.operands
    if x.shape is site.shape:
        return x
    if x.opcode == "copy":
        return site.build.add("copy", x.operands[0], shape=site.shape)
    return None


RULES: dict[str, tuple[Rule, ...]] = {
    "convert": (convert_twice, convert_broadcast, convert_iota),
    "copy": (copy_nothing,),
}
