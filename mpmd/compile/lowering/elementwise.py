"""Lowering of elementwise operations."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.site import LoweringSite, Rule, plain

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
    opcode = site.name.partition(".")[2].replace("_", "-")
    return site.build.add(opcode, *site.operands)


def compare(site: LoweringSite) -> HloInstruction:
    """HLO marks only the total order of floats; other comparisons follow from the element type."""
    total = site.attribute("compare_type") == "TOTALORDER"
    return site.build.add(
        "compare",
        *site.operands,
        direction=site.required("comparison_direction"),
        comparison_type="TOTALORDER" if total else None,
    )


def mapped(site: LoweringSite) -> HloInstruction:
    return site.build.add(
        "map", *site.operands, dimensions=site.required("dimensions"), called=(site.region(),)
    )


RULES: dict[str, Rule] = {
    **{f"stablehlo.{name}": same for name in _SAME},
    "stablehlo.bitcast_convert": plain("bitcast-convert", shaped=True),
    "stablehlo.compare": compare,
    "stablehlo.convert": plain("convert", shaped=True),
    "stablehlo.map": mapped,
    "stablehlo.reduce_precision": plain(
        "reduce-precision", exponent_bits="exponent_bits", mantissa_bits="mantissa_bits"
    ),
}
