"""Rules of element types: convert, bitcast-convert, reduce-precision, copy.

All are exact: a conversion is dropped only if it kept every value.
"""

from __future__ import annotations

import ml_dtypes

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import MANTISSA
from mpmd.compile.passes.rewriter import RewriteSite, Rule


def _format(dtype: str) -> tuple[int, int, int]:
    """Stored mantissa bits of a float, smallest and largest exponent of its normal numbers."""
    info = ml_dtypes.finfo(DTYPES[dtype].numpy)  # type: ignore[no-untyped-call]
    return info.nmant, info.minexp, info.maxexp - 1


def is_lossless(source: str, target: str) -> bool:
    """True if every value of one element type is a value of the other."""
    if source == target:
        return True
    if source == "pred":
        return target != "f8e8m0fnu"  # which has no zero
    a, b = DTYPES[source], DTYPES[target]
    if b.kind == "complex":
        part = "f32" if target == "c64" else "f64"
        return source == "c64" if a.kind == "complex" else is_lossless(source, part)
    if a.is_integral and b.is_integral:
        if a.kind == b.kind:
            return a.bits <= b.bits
        return a.kind == "unsigned" and a.bits < b.bits
    if target not in MANTISSA:  # infinities become something else
        return False
    if a.is_integral:
        digits = a.bits - (a.kind == "signed")
        return digits <= _format(target)[0] + 1
    if not a.is_floating:
        return False
    (m, low, high), (wide, lowest, highest) = _format(source), _format(target)
    return m <= wide and high <= highest and low >= lowest


def convert_twice(site: RewriteSite) -> HloInstruction | None:
    """convert(convert(x)) → convert(x), where the first conversion kept every value.

    An integer that its target cannot hold wraps, but saturates if it has been a float.
    """
    (inner,) = site.operands
    if inner.opcode != "convert":
        return None
    (x,) = inner.operands
    source, between, target = (v.shape.info for v in (x, inner, site.at))
    if not is_lossless(source.name, between.name):
        return None
    wraps = source.is_integral and target.is_integral and not is_lossless(source.name, target.name)
    if wraps and not between.is_integral:
        return None
    return site.build.convert(x, target.name)


def copy_nothing(site: RewriteSite) -> HloInstruction | None:
    """A copy to the same layout → its operand; a copy of a copy → one copy."""
    (x,) = site.operands
    if x.shape is site.shape:
        return x
    if x.opcode == "copy":
        return site.build.add("copy", x.operands[0], shape=site.shape)
    return None


RULES: dict[str, tuple[Rule, ...]] = {
    "convert": (convert_twice,),
    "copy": (copy_nothing,),
}
