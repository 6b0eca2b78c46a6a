"""Rules of data movement: compose it, drop what moves nothing, and do elementwise work before a broadcast.

All are exact.  Dynamic slices clamp a start so that the part is inside, and so do the rules that make them
static.  Tuples and custom calls that only mark a value are here, too: they move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.rewriter import RewriteSite, Rule, integer, is_trivial


def reshape_nothing(site: RewriteSite) -> HloInstruction | None:
    (x,) = site.operands
    return x if x.shape.logical is site.shape.logical else None


def reshape_twice(site: RewriteSite) -> HloInstruction | None:
    (inner,) = site.operands
    if inner.opcode != "reshape":
        return None
    return site.build.reshape(inner.operands[0], site.shape.dims)


def transpose_twice(site: RewriteSite) -> HloInstruction | None:
    (inner,) = site.operands
    if inner.opcode != "transpose":
        return None
    order = tuple(inner.dimensions[d] for d in site.at.dimensions)
    return site.build.transpose(inner.operands[0], order)


def transpose_of_ones(site: RewriteSite) -> HloInstruction | None:
    """A transpose that moves only dims of size 1 → reshape."""
    (x,) = site.operands
    if not moves_only_ones(site.shape.dims, site.at.dimensions):
        return None
    return site.build.reshape(x, site.shape.dims)


def moves_only_ones(dims: Ints, permutation: Ints) -> bool:
    """True if the dims that are not of size 1 keep their order; `dims` are those of the result."""
    kept = [source for size, source in zip(dims, permutation) if size != 1]
    return kept == sorted(kept)


def bitcast_nothing(site: RewriteSite) -> HloInstruction | None:
    """A bitcast to the same shape → its operand; bitcast(bitcast(x)) → bitcast(x)."""
    (x,) = site.operands
    if x.shape is site.shape:
        return x
    if x.opcode != "bitcast" or x.operands[0].shape.dtype != site.shape.dtype:
        return None
    if x.operands[0].shape is site.shape:
        return x.operands[0]
    return site.build.add("bitcast", x.operands[0], shape=site.shape)


def known_size(site: RewriteSite) -> HloInstruction | None:
    (x,), (dim,) = site.operands, site.at.dimensions
    if x.shape.dynamic and x.shape.dynamic[dim]:
        return None
    return site.build.constant(x.shape.dims[dim], "s32")


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
        stretched = (operand.dimensions, x.shape.dims)
        if pattern not in (None, stretched):
            return None
        pattern = stretched
    if not site.shape.rank:
        return None
    dimensions, dims = pattern or ((), ())
    if array("pred", dims).size >= site.shape.size:
        return None
    values = [_source(site, operand, dims) for operand in site.operands]
    small = site.same(*values, shape=array(site.shape.dtype, dims))
    return site.build.broadcast(small, site.shape.dims, dimensions)


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


def slice_nothing(site: RewriteSite) -> HloInstruction | None:
    (x,) = site.operands
    return x if x.shape.logical is site.shape.logical else None


def pad_nothing(site: RewriteSite) -> HloInstruction | None:
    x = site.operands[0]
    plain = all(
        p.low == p.high == 0 and (not p.interior or n <= 1) for p, n in zip(site.at.padding, x.shape.dims)
    )
    return x if plain else None


def _fixed(starts: Sequence[HloInstruction], dims: Ints, sizes: Ints) -> list[int] | None:
    """The clamped starts; None unless all are known."""
    out = []
    for start, n, size in zip(starts, dims, sizes):
        known = 0 if n == size else integer(start)
        if known is None:
            return None
        out.append(min(max(known, 0), n - size))
    return out


def slice_at_constant(site: RewriteSite) -> HloInstruction | None:
    """dynamic-slice at constant starts → slice; of everything → its operand."""
    x, *starts = site.operands
    fixed = _fixed(starts, x.shape.dims, site.shape.dims)
    if fixed is None:
        return None
    if x.shape.logical is site.shape.logical:
        return x
    return site.build.slice(x, fixed, [a + n for a, n in zip(fixed, site.shape.dims)])


def update_everything(site: RewriteSite) -> HloInstruction | None:
    """dynamic-update-slice of the whole array → the update; of nothing → the array."""
    x, update, *_ = site.operands
    if is_trivial(update):
        return x
    return update if update.shape.logical is x.shape.logical else None


def set_whole_size(site: RewriteSite) -> HloInstruction | None:
    """set-dimension-size(x, n) → x, if x has n elements along the dim."""
    x, size = site.operands
    (dim,) = site.at.dimensions
    whole = integer(size) == x.shape.dims[dim]
    return x if whole and x.shape.logical is site.shape.logical else None


_MARKS = frozenset(("MoveToDevice", "MoveToHost", "Sharding"))


def drop_mark(site: RewriteSite) -> HloInstruction | None:
    """Sharding(x), MoveToHost(x), MoveToDevice(x) → x, on one device; memory of the host is not used."""
    module = site.at.parent.module
    if site.at.custom_call_target not in _MARKS or module.num_partitions > 1 or len(site.operands) != 1:
        return None
    return site.operands[0] if site.operands[0].shape.logical is site.shape.logical else None


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


TUPLES: dict[str, tuple[Rule, ...]] = {
    "constant": (tuple_of_constants,),
    "copy": (copy_of_tuple,),
    "get-tuple-element": (element_of_tuple,),
    "tuple": (tuple_of_elements,),
}
"""The rules of tuples alone."""

RULES: dict[str, tuple[Rule, ...]] = {
    "get-dimension-size": (known_size,),
    "reshape": (reshape_nothing, reshape_twice),
    "transpose": (transpose_twice, transpose_of_ones),
    "bitcast": (bitcast_nothing,),
    **dict.fromkeys(_SINKABLE, (sink,)),
    "broadcast": (broadcast_nothing, broadcast_twice),
    "slice": (slice_nothing,),
    "pad": (pad_nothing,),
    "dynamic-slice": (slice_at_constant,),
    "set-dimension-size": (set_whole_size,),
    "dynamic-update-slice": (update_everything,),
    "custom-call": (drop_mark,),
    **TUPLES,
}
