"""Rules of broadcasts: compose them, and do elementwise work before them.

All are exact: they compute fewer copies of the same numbers.
"""

from __future__ import annotations

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.rewriter import RewriteSite, Rule


def broadcast_nothing(site: RewriteSite) -> HloInstruction | None:
    (x,) = site.operands
    plain = site.at.dimensions == tuple(range(x.shape.rank))
    return x if plain and x.shape.logical is site.shape.logical else None


def broadcast_twice(site: RewriteSite) -> HloInstruction | None:
    (inner,) = site.operands
    if inner.opcode != "broadcast":
        return None
    dims = tuple(site.at.dimensions[d] for d in inner.dimensions)
    return site.build.broadcast(inner.operands[0], site.shape.dims, dims)


def sink(site: RewriteSite) -> HloInstruction | None:
    """op(broadcast(x), broadcast(y), splat) → broadcast(op(x, y, splat)), with equal broadcast dims.

    Scalars that apply to all elements (of select and clamp) stay.
    """
    pattern = None
    for operand in site.operands:
        if operand.shape.is_scalar and site.shape.rank:
            continue
        if operand.opcode != "broadcast":
            return None
        x = operand.operands[0]
        if x.shape.is_scalar:
            continue
        found = (operand.dimensions, x.shape.dims)
        if pattern not in (None, found):
            return None
        pattern = found
    if not site.shape.rank:
        return None
    dimensions, dims = pattern or ((), ())
    if array("pred", dims).size >= site.shape.size:
        return None
    values = [_source(site, operand, dims) for operand in site.operands]
    made = site.same(*values, shape=array(site.shape.dtype, dims))
    return site.build.broadcast(made, site.shape.dims, dimensions)


def _source(site: RewriteSite, operand: HloInstruction, dims: Ints) -> HloInstruction:
    """The replacement of an operand before the broadcast."""
    if operand.shape.is_scalar:
        return operand
    (x,) = operand.operands
    if x.shape.dims == dims:
        return x
    return site.build.broadcast(x, dims)


_SINKABLE = [
    name
    for name, info in OPCODES.items()
    if info.category in ELEMENTWISE
    and name not in ("convert", "bitcast-convert", "copy", "stochastic-convert", "map")
]

RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_SINKABLE, (sink,)),
    "broadcast": (broadcast_nothing, broadcast_twice),
}
