"""Rules of slice and pad that move nothing, and of those at places that are known.

All are exact: dynamic slices clamp a start so that the part is inside, and so do the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.values import integer, is_trivial


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


RULES: dict[str, tuple[Rule, ...]] = {
    "slice": (slice_nothing,),
    "pad": (pad_nothing,),
    "dynamic-slice": (slice_at_constant,),
    "set-dimension-size": (set_whole_size,),
    "dynamic-update-slice": (update_everything,),
}
