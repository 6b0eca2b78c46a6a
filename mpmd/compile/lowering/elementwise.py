"""Lowering of elementwise operations."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.site import LoweringSite, Rule

_SAME = [
    "abs",
    "add",
    "and",
    "atan2",
    "cbrt",
    "ceil",
    "clamp",
    "complex",
    "cosine",
    "divide",
    "exponential",
    "floor",
    "imag",
    "is_finite",
    "log",
    "logistic",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "not",
    "or",
    "popcnt",
    "power",
    "real",
    "remainder",
    "rsqrt",
    "select",
    "sign",
    "sine",
    "sqrt",
    "subtract",
    "tan",
    "tanh",
    "xor",
    "count_leading_zeros",
    "exponential_minus_one",
    "log_plus_one",
    "round_nearest_afz",
    "round_nearest_even",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
]


def same(site: LoweringSite) -> HloInstruction:
    """HLO has the operation under the same name."""
    opcode = site.name.partition(".")[2].replace("_", "-")
    return site.build.add(opcode, *site.operands)


def convert(site: LoweringSite) -> HloInstruction:
    """Other elements."""
    return site.build.add("convert", site.operands[0], shape=site.shape)


def bitcast_convert(site: LoweringSite) -> HloInstruction:
    """The same bits read as other elements."""
    return site.build.add("bitcast-convert", site.operands[0], shape=site.shape)


def compare(site: LoweringSite) -> HloInstruction:
    """HLO marks only the total order of floats; other comparisons follow from the element type."""
    total = site.attribute("compare_type") == "TOTALORDER"
    return site.build.add(
        "compare",
        *site.operands,
        direction=site.required("comparison_direction"),
        comparison_type="TOTALORDER" if total else None,
    )


def reduce_precision(site: LoweringSite) -> HloInstruction:
    """Rounding to fewer bits."""
    return site.build.add(
        "reduce-precision",
        site.operands[0],
        exponent_bits=site.required("exponent_bits"),
        mantissa_bits=site.required("mantissa_bits"),
    )


def mapped(site: LoweringSite) -> HloInstruction:
    """A computation on scalars, for each element."""
    return site.build.add(
        "map", *site.operands, dimensions=site.required("dimensions"), called=(site.region(),)
    )


RULES: dict[str, Rule] = {
    **{f"stablehlo.{name}": same for name in _SAME},
    "stablehlo.bitcast_convert": bitcast_convert,
    "stablehlo.compare": compare,
    "stablehlo.convert": convert,
    "stablehlo.map": mapped,
    "stablehlo.reduce_precision": reduce_precision,
}
