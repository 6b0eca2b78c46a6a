"""Lowering of CHLO: operations that HLO has, and special functions by their decomposition."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.reader import expand_chlo
from mpmd.compile.lowering.site import LoweringSite, Rule

_SPECIAL = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "asin_acos_kernel",
    "atan",
    "atanh",
    "bessel_i1e",
    "cosh",
    "digamma",
    "erf_inv",
    "erfc",
    "is_inf",
    "is_neg_inf",
    "is_pos_inf",
    "lgamma",
    "next_after",
    "polygamma",
    "sinh",
    "zeta",
]


def same(site: LoweringSite) -> HloInstruction:
    """HLO has the operation under the same name."""
    return site.build.add(site.name.partition(".")[2], *site.operands)


def square(site: LoweringSite) -> HloInstruction:
    """`x * x`."""
    (value,) = site.operands
    return site.build.add("multiply", value, value)


def conjugate(site: LoweringSite) -> HloInstruction:
    """The complex conjugate; a real number is its own."""
    (value,) = site.operands
    if value.shape.info.kind != "complex":
        return value
    build = site.build
    return build.add("complex", build.add("real", value), build.add("negate", build.add("imag", value)))


def top_k(site: LoweringSite) -> Sequence[HloInstruction]:
    """The k largest values of the last dim and their positions."""
    return site.parts(site.build.add("topk", site.operands[0], k=site.required("k"), largest=True))


def special(site: LoweringSite) -> Sequence[HloInstruction]:
    """A special function: a call of its decomposition."""
    program = expand_chlo(site.operation, tuple(o.shape for o in site.operands))
    name = site.name.replace(".", "_")
    computation = site.lowering.imported(program, f"{name}_{site.shape}")
    return site.parts(site.build.call(computation, site.operands))


RULES: dict[str, Rule] = {
    **{f"chlo.{name}": special for name in _SPECIAL},
    "chlo.conj": conjugate,
    "chlo.erf": same,
    "chlo.mulhi": same,
    "chlo.square": square,
    "chlo.tan": same,
    "chlo.top_k": top_k,
}
