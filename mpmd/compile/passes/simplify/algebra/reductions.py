"""Rules of reductions by `(a, b) -> op(a, b)`.

Sums and products of floats may be formed in another order: their order is not fixed to begin with.
"""

from __future__ import annotations

import math

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.values import is_identity, is_trivial, reducer


def _simple(site: RewriteSite) -> str | None:
    """The opcode of a reduction of one array."""
    if len(site.operands) != 2:
        return None
    opcode = reducer(site.at.to_apply)
    same = site.at.to_apply.root.shape.dtype == site.shape.dtype
    return opcode if same else None


def _with_init(site: RewriteSite, opcode: str, value: HloInstruction) -> HloInstruction:
    """The value combined with the reduction's initial value."""
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


def reduce_of_transpose(site: RewriteSite) -> HloInstruction | None:
    """reduce(transpose(x)) → reduce(x), where the dims that stay keep their order."""
    inner = site.operands[0]
    if _simple(site) is None or inner.opcode != "transpose":
        return None
    order = inner.dimensions
    kept = [order[d] for d in range(inner.shape.rank) if d not in site.at.dimensions]
    if kept != sorted(kept):
        return None
    dims = tuple(sorted(order[d] for d in site.at.dimensions))
    return site.same(inner.operands[0], site.operands[1], dimensions=dims)


def reduce_of_broadcast(site: RewriteSite) -> HloInstruction | None:
    """A sum of n copies → n * x; max, min, and, or of copies → x."""
    opcode = _simple(site)
    inner = site.operands[0]
    if opcode is None or inner.opcode != "broadcast" or is_trivial(inner):
        return None
    copied = [d for d in site.at.dimensions if d not in inner.dimensions]
    count = math.prod(inner.shape.dims[d] for d in copied)
    if not copied or opcode not in ("add", "maximum", "minimum", "and", "or"):
        return None
    exact = {"bf16": 256, "f16": 2048}.get(site.shape.dtype, 1 << 24)
    if opcode == "add" and (not site.shape.info.is_integral and count > exact):
        return None
    if site.shape.info.is_integral and count >= 1 << (site.shape.info.bits - 1):
        return None
    kept = [d for d in range(inner.shape.rank) if d not in copied]
    x = site.build.broadcast(
        inner.operands[0], [inner.shape.dims[d] for d in kept], [kept.index(d) for d in inner.dimensions]
    )
    if opcode == "add":
        x = site.build.add("multiply", x, site.build.full(count, x.shape.dtype, x.shape.dims))
    rest = tuple(kept.index(d) for d in site.at.dimensions if d not in copied)
    return site.same(x, site.operands[1], dimensions=rest) if rest else _with_init(site, opcode, x)


RULES: dict[str, tuple[Rule, ...]] = {
    "reduce": (
        reduce_nothing,
        reduce_of_nothing,
        reduce_of_transpose,
        reduce_of_broadcast,
    )
}
