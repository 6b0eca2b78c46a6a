"""Rules of broadcasts and iotas: compose them, and do elementwise work before them.

All are exact: they compute fewer copies of the same numbers.
"""

from __future__ import annotations

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.values import splat


def broadcast_nothing(site: RewriteSite) -> HloInstruction | None:
    """A broadcast to the same dims → its operand."""
    (x,) = site.operands
    plain = site.at.dimensions == tuple(range(x.shape.rank))
    return x if plain and x.shape.logical is site.shape.logical else None


def broadcast_twice(site: RewriteSite) -> HloInstruction | None:
    """broadcast(broadcast(x)) → broadcast(x)."""
    (inner,) = site.operands
    if inner.opcode != "broadcast":
        return None
    dims = tuple(site.at.dimensions[d] for d in inner.dimensions)
    return site.build.broadcast(inner.operands[0], site.shape.dims, dims)


def broadcast_of_reshape(site: RewriteSite) -> HloInstruction | None:
    """broadcast(reshape(x)) → broadcast(x), where the reshape only adds dims of size 1."""
    (inner,) = site.operands
    if inner.opcode != "reshape" or inner.operands[0].shape.rank >= inner.shape.rank:
        return None
    places = places_of_dims(inner.operands[0].shape.dims, inner.shape.dims)
    if places is None:
        return None
    dims = tuple(site.at.dimensions[p] for p in places)
    return site.build.broadcast(inner.operands[0], site.shape.dims, dims)


def places_of_dims(small: Ints, large: Ints) -> Ints | None:
    """The dims of `large` that correspond to those of `small`, if the others of `large` have size 1."""
    places: list[int] = []
    for d, size in enumerate(large):
        # A dim of size 1 is matched only where the small shape has one as well.
        if len(places) < len(small) and small[len(places)] == size:
            places.append(d)
        elif size != 1:
            return None
    return tuple(places) if len(places) == len(small) else None


def broadcast_of_iota(site: RewriteSite) -> HloInstruction | None:
    """broadcast(iota) → iota."""
    (inner,) = site.operands
    if inner.opcode != "iota" or not inner.shape.rank:
        return None
    dim = site.at.dimensions[inner.iota_dimension]
    return site.build.iota(site.shape.dtype, site.shape.dims, dim)


def iota_of_one(site: RewriteSite) -> HloInstruction | None:
    """Iota along a dim of size 1 → 0."""
    if site.shape.rank and site.shape.dims[site.at.iota_dimension] != 1:
        return None
    return site.build.full(0, site.shape.dtype, site.shape.dims)


def reshape_of_broadcast(site: RewriteSite) -> HloInstruction | None:
    """reshape(broadcast(x)) → broadcast(x), of scalars and where only dims of size 1 come or go."""
    (inner,) = site.operands
    if inner.opcode != "broadcast":
        return None
    (x,) = inner.operands
    if x.shape.is_scalar:
        return site.build.broadcast(x, site.shape.dims)
    places = places_of_dims(inner.shape.dims, site.shape.dims)
    if places is not None:
        dims = tuple(places[d] for d in inner.dimensions)
        return site.build.broadcast(x, site.shape.dims, dims)
    places = places_of_dims(site.shape.dims, inner.shape.dims)
    if places is None or any(d not in places for d in inner.dimensions):
        return None
    return site.build.broadcast(x, site.shape.dims, tuple(places.index(d) for d in inner.dimensions))


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


def reverse_nothing(site: RewriteSite) -> HloInstruction | None:
    """Reverse of dims of size 1, or of equal elements → its operand; reverse(reverse(x)) → x."""
    (x,) = site.operands
    if all(site.shape.dims[d] <= 1 for d in site.at.dimensions) or splat(x) is not None:
        return x
    if x.opcode == "broadcast" and not set(x.dimensions) & set(site.at.dimensions):
        return x
    if x.opcode == "reverse" and sorted(x.dimensions) == sorted(site.at.dimensions):
        return x.operands[0]
    return None


_SINKABLE = [
    name
    for name, info in OPCODES.items()
    if info.category in ELEMENTWISE
    and name not in ("convert", "bitcast-convert", "copy", "stochastic-convert", "map")
]

RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_SINKABLE, (sink,)),
    "broadcast": (broadcast_nothing, broadcast_twice, broadcast_of_reshape, broadcast_of_iota),
    "iota": (iota_of_one,),
    "reshape": (reshape_of_broadcast,),
    "reverse": (reverse_nothing,),
}
