"""Rules of reductions by `(a, b) -> op(a, b)`.

Sums and products of floats may be formed in another order: their order is not fixed to begin with.
"""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.values import is_identity, is_trivial, reducer


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
    "reduce": (
        reduce_nothing,
        reduce_of_nothing,
    )
}
