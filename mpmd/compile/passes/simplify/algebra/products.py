"""Rules of matrix products, and of reductions by `(a, b) -> op(a, b)`.

Sums and products of floats may be formed in another order: their order is not fixed to begin with.  A product
of two narrow floats is rounded once either way.
"""

from __future__ import annotations

from mpmd.compile.hlo.attributes import DotDims
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule, is_identity, is_trivial, reducer
from mpmd.compile.passes.simplify.algebra.elementwise import is_lossless, zeros


def dot_of_nothing(site: RewriteSite) -> HloInstruction | None:
    """A product over a contracted dim of size 0 → 0."""
    return zeros(site) if is_trivial(site.operands[0]) and not is_trivial(site.at) else None


def dot_of_ones(site: RewriteSite) -> HloInstruction | None:
    """A product whose contracted dims have size 1 → multiply of broadcasts."""
    a, b = site.operands[:2]
    dims = site.at.dot_dims
    if len(site.operands) != 2 or any(a.shape.dims[d] != 1 for d in dims.lhs_contracting):
        return None
    if "algorithm" in site.at.attributes or not all(
        is_lossless(o.shape.dtype, site.shape.dtype) for o in (a, b)
    ):
        return None
    rank_a, rank_b = a.shape.rank, b.shape.rank
    free_a, free_b = dims.lhs_free(rank_a), dims.rhs_free(rank_b)
    batch = len(dims.lhs_batch)
    places_a = {d: i for i, d in enumerate((*dims.lhs_batch, *free_a))}
    places_b = {d: i for i, d in enumerate(dims.rhs_batch)}
    places_b |= {d: batch + len(free_a) + i for i, d in enumerate(free_b)}
    return site.build.add(
        "multiply",
        _spread(site, a, dims.lhs_contracting, places_a),
        _spread(site, b, dims.rhs_contracting, places_b),
    )


def _spread(
    site: RewriteSite, value: HloInstruction, dropped: tuple[int, ...], places: dict[int, int]
) -> HloInstruction:
    """A side of the product as an array of the result's dims."""
    kept = [d for d in range(value.shape.rank) if d not in dropped]
    x = site.build.reshape(value, [value.shape.dims[d] for d in kept])
    order = sorted(range(len(kept)), key=lambda i: places[kept[i]])
    x = site.build.transpose(x, order)
    x = site.build.convert(x, site.shape.dtype)
    target = [places[kept[i]] for i in order]
    return site.build.broadcast(x, site.shape.dims, target)


def transpose_of_dot(site: RewriteSite) -> HloInstruction | None:
    """transpose(dot(x, y)) → dot(y, x), where it exchanges the free dims of the sides."""
    (inner,) = site.operands
    if inner.opcode != "dot" or len(inner.operands) != 2 or len(inner.users) != 1:
        return None
    if "algorithm" in inner.attributes:
        return None
    a, b = inner.operands
    dims = inner.dot_dims
    batch = len(dims.lhs_batch)
    left, right = len(dims.lhs_free(a.shape.rank)), len(dims.rhs_free(b.shape.rank))
    swapped = (*range(batch), *range(batch + left, batch + left + right), *range(batch, batch + left))
    if site.at.dimensions != swapped:
        return None
    precision = inner.attributes.get("operand_precision")
    return site.build.like(
        inner,
        (b, a),
        site.shape,
        dot_dims=DotDims(dims.rhs_contracting, dims.lhs_contracting, dims.rhs_batch, dims.lhs_batch),
        operand_precision=precision[::-1] if isinstance(precision, tuple) else None,
    )


def _simple(site: RewriteSite) -> str | None:
    if len(site.operands) != 2:
        return None
    opcode = reducer(site.at.to_apply)
    same = site.at.to_apply.root.shape.dtype == site.shape.dtype
    return opcode if same else None


def _with_init(site: RewriteSite, opcode: str, value: HloInstruction) -> HloInstruction:
    init = site.operands[1]
    if is_identity(opcode, init):
        return value
    return site.build.add(opcode, site.build.broadcast(init, value.shape.dims), value)


def reduce_nothing(site: RewriteSite) -> HloInstruction | None:
    """A reduction over no dims, or over dims of size 1 → reshape."""
    opcode = _simple(site)
    x = site.operands[0]
    if opcode is None or any(x.shape.dims[d] != 1 for d in site.at.dimensions):
        return None
    return _with_init(site, opcode, site.build.reshape(x, site.shape.dims))


def reduce_of_nothing(site: RewriteSite) -> HloInstruction | None:
    """A reduction of an empty array → its initial value."""
    if len(site.operands) != 2 or not is_trivial(site.operands[0]):
        return None
    if site.operands[1].shape.dtype != site.shape.dtype:
        return None
    return site.build.broadcast(site.operands[1], site.shape.dims)


RULES: dict[str, tuple[Rule, ...]] = {
    "dot": (dot_of_nothing, dot_of_ones),
    "transpose": (transpose_of_dot,),
    "reduce": (
        reduce_nothing,
        reduce_of_nothing,
    ),
}
