"""Rules of reshape, transpose and bitcast: compose them, drop those that move nothing.

All are exact.
"""

from __future__ import annotations

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule


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


RULES: dict[str, tuple[Rule, ...]] = {
    "get-dimension-size": (known_size,),
    "reshape": (reshape_nothing, reshape_twice),
    "transpose": (transpose_twice, transpose_of_ones),
    "bitcast": (bitcast_nothing,),
}
