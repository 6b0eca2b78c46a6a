"""Rules of tuples.  All are exact."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule


def element_of_tuple(site: RewriteSite) -> HloInstruction | None:
    """get-tuple-element(tuple(x, y), 1) → y."""
    (inner,) = site.operands
    return inner.operands[site.at.tuple_index] if inner.opcode == "tuple" else None


def tuple_of_elements(site: RewriteSite) -> HloInstruction | None:
    """tuple(x[0], x[1], ...) → x."""
    if not site.operands or site.operands[0].opcode != "get-tuple-element":
        return None
    (source,) = site.operands[0].operands
    if source.shape is not site.shape:
        return None
    for i, operand in enumerate(site.operands):
        fits = operand.opcode == "get-tuple-element" and operand.operands[0] is source
        if not fits or operand.tuple_index != i:
            return None
    return source


def tuple_of_constants(site: RewriteSite) -> HloInstruction | None:
    """constant((1, 2)) → tuple(constant(1), constant(2))."""
    literal = site.at.literal
    if not isinstance(literal, tuple):
        return None
    return site.build.tuple([site.build.literal(part) for part in literal])


def copy_of_tuple(site: RewriteSite) -> HloInstruction | None:
    """copy(tuple(x, y)) → tuple(x, y): what may not share memory is kept apart when memory is assigned."""
    return site.operands[0] if site.shape.is_tuple else None


RULES: dict[str, tuple[Rule, ...]] = {
    "constant": (tuple_of_constants,),
    "copy": (copy_of_tuple,),
    "get-tuple-element": (element_of_tuple,),
    "tuple": (tuple_of_elements,),
}
