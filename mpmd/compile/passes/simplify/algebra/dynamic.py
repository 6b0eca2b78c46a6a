"""Rules of dynamic-slice and dynamic-update-slice.

All are exact: both move a start so that the part lies inside, and so do the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.attributes import Ints, PadDim
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.values import integer, is_trivial


def _fixed(starts: Sequence[HloInstruction], dims: Ints, sizes: Ints) -> list[int] | None:
    """The starts, moved inside; None unless all are known."""
    out = []
    for start, n, size in zip(starts, dims, sizes):
        known = 0 if n == size else integer(start)
        if known is None:
            return None
        out.append(min(max(known, 0), n - size))
    return out


def _same(a: Sequence[HloInstruction], b: Sequence[HloInstruction]) -> bool:
    return all(x is y or (integer(x) is not None and integer(x) == integer(y)) for x, y in zip(a, b))


def slice_at_constant(site: RewriteSite) -> HloInstruction | None:
    """dynamic-slice at constant starts → slice; of everything → its operand."""
    x, *starts = site.operands
    fixed = _fixed(starts, x.shape.dims, site.shape.dims)
    if fixed is None:
        return None
    if x.shape.logical is site.shape.logical:
        return x
    return site.build.slice(x, fixed, [a + n for a, n in zip(fixed, site.shape.dims)])


def slice_of_broadcast(site: RewriteSite) -> HloInstruction | None:
    """dynamic-slice(broadcast(x)) → broadcast(dynamic-slice(x))."""
    inner, *starts = site.operands
    if inner.opcode != "broadcast":
        return None
    (x,) = inner.operands
    sizes = [site.shape.dims[d] for d in inner.dimensions]
    if tuple(sizes) != x.shape.dims:
        x = site.build.dynamic_slice(x, [starts[d] for d in inner.dimensions], sizes)
    return site.build.broadcast(x, site.shape.dims, inner.dimensions)


def slice_of_update(site: RewriteSite) -> HloInstruction | None:
    """dynamic-slice(dynamic-update-slice(x, update, starts), starts) → update."""
    inner, *starts = site.operands
    if inner.opcode != "dynamic-update-slice":
        return None
    _, update, *written = inner.operands
    if update.shape.logical is not site.shape.logical or not _same(starts, written):
        return None
    return update


def update_everything(site: RewriteSite) -> HloInstruction | None:
    """dynamic-update-slice of the whole array → the update; of nothing → the array."""
    x, update, *_ = site.operands
    if is_trivial(update):
        return x
    return update if update.shape.logical is x.shape.logical else None


def update_with_itself(site: RewriteSite) -> HloInstruction | None:
    """dynamic-update-slice(x, dynamic-slice(x, starts), starts) → x."""
    x, update, *starts = site.operands
    if update.opcode != "dynamic-slice" or update.operands[0] is not x:
        return None
    return x if _same(update.operands[1:], starts) else None


def update_again(site: RewriteSite) -> HloInstruction | None:
    """dynamic-update-slice(dynamic-update-slice(x, u, starts), v, starts) → one with v alone."""
    inner, update, *starts = site.operands
    if inner.opcode != "dynamic-update-slice" or inner.operands[1].shape.logical is not update.shape.logical:
        return None
    if not _same(inner.operands[2:], starts):
        return None
    return site.same(inner.operands[0], update, *starts)


def update_of_splat(site: RewriteSite) -> HloInstruction | None:
    """dynamic-update-slice(broadcast(c), update, constants) → pad(update, c)."""
    x, update, *starts = site.operands
    if x.opcode != "broadcast" or not x.operands[0].shape.is_scalar:
        return None
    fixed = _fixed(starts, x.shape.dims, update.shape.dims)
    if fixed is None:
        return None
    padding = [PadDim(a, n - a - size) for a, n, size in zip(fixed, x.shape.dims, update.shape.dims)]
    return site.build.pad(update, x.operands[0], padding)


def set_whole_size(site: RewriteSite) -> HloInstruction | None:
    """set-dimension-size(x, n) → x, if x has n elements along the dim."""
    x, size = site.operands
    (dim,) = site.at.dimensions
    whole = integer(size) == x.shape.dims[dim]
    return x if whole and x.shape.logical is site.shape.logical else None


RULES: dict[str, tuple[Rule, ...]] = {
    "dynamic-slice": (slice_at_constant, slice_of_broadcast, slice_of_update),
    "set-dimension-size": (set_whole_size,),
    "dynamic-update-slice": (update_everything, update_with_itself, update_again, update_of_splat),
}
