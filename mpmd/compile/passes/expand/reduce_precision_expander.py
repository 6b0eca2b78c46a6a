"""hlo-reduce-precision-expander."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite

_LAYOUT = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
"""Bits of the exponent and of the mantissa."""


class ReducePrecisionExpander(ComputationPass):
    """Rounds to fewer bits with integers.

    reduce-precision(x: f32), 5 bits of exponent, 3 of mantissa
      -> bits + (the rounding of the last kept bit to even), without the dropped bits; infinity where the
      exponent
      is too large, zero where it is too small

    f32 is rounded to bf16 by two conversions.

    Requires: no schedule.
    Ensures: no reduce-precision is left, but of types other than f16, bf16, f32 and f64.
    Cost: linear.
    Source: the definition of XLA's operation: to nearest even, denormal results become zeros.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"reduce-precision": (_expand,)}, lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction | None:
    dtype = site.shape.dtype
    wanted = tuple(int(str(site.at.attributes[f"{part}_bits"])) for part in ("exponent", "mantissa"))
    build, (x,) = site.build, site.operands
    if dtype not in _LAYOUT:
        return None
    if wanted == _LAYOUT[dtype]:
        return x
    if (dtype, wanted) == ("f32", _LAYOUT["bf16"]):
        return build.convert(build.convert(x, "bf16"), dtype)
    kind = f"u{site.shape.info.bits}"
    bits = build.add("bitcast-convert", x, shape=site.shape.with_dtype(kind))
    rounding = _Rounding(site, bits, kind)
    rounded, is_nan = rounding.rounded(*wanted), build.compare(x, x, "NE")
    if not wanted[1]:  # no mantissa is left to distinguish NaN from infinity
        rounded = build.select(is_nan, rounding.infinite(), rounded)
    made = build.add("bitcast-convert", rounded, shape=site.shape)
    return build.select(is_nan, x, made) if wanted[1] else made


class _Rounding:
    """Integers that are the bits of floats."""

    def __init__(self, site: RewriteSite, bits: HloInstruction, kind: str) -> None:
        self.build = site.build
        self.bits = bits
        self.kind = kind
        self.exponent, self.mantissa = _LAYOUT[site.shape.dtype]

    def full(self, value: int) -> HloInstruction:
        """One integer everywhere."""
        literal = self.bits.shape.with_dtype(self.kind).numpy_dtype.type(value)
        return self.build.broadcast(self.build.constant(literal), self.bits.shape.dims)

    def sign(self) -> HloInstruction:
        """The sign alone."""
        return self.build.add("and", self.bits, self.full(1 << (self.exponent + self.mantissa)))

    def infinite(self) -> HloInstruction:
        """Infinities of the same sign."""
        return self.build.add("or", self.sign(), self.full(((1 << self.exponent) - 1) << self.mantissa))

    def rounded(self, exponent: int, mantissa: int) -> HloInstruction:
        """The remaining bits."""
        build, bits = self.build, self.bits
        gone = self.mantissa - mantissa
        if gone > 0:
            last = build.add("shift-right-logical", bits, self.full(gone))
            odd = build.add("and", last, self.full(1))
            half = self.full((1 << (gone - 1)) - 1)
            bits = build.add("add", bits, build.add("add", odd, half))
            bits = build.add("and", bits, self.full(((1 << (self.exponent + mantissa + 1)) - 1) << gone))
        if exponent >= self.exponent:
            return bits
        sign = self.sign()
        mask = (1 << self.exponent) - 1
        power = build.add("and", bits, self.full(mask << self.mantissa))
        bias, narrow_bias = mask >> 1, (1 << (exponent - 1)) - 1
        least, most = (bias + k for k in (1 - narrow_bias - 1, narrow_bias))
        over = build.compare(power, self.full(most << self.mantissa), "GT")
        under = build.compare(power, self.full(least << self.mantissa), "LE")
        return build.select(over, self.infinite(), build.select(under, sign, bits))
