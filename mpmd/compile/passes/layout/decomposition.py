"""Broadcasts and reshapes in forms whose layout is simple."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.layout.physical import is_bitcast
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class BroadcastCanonicalizer(ComputationPass):
    """Canonicalises broadcasts to keep the order of dims.

    broadcast(x: [2,3]), dimensions={2,0}  ->  broadcast(transpose(x): [3,2]), dimensions={0,2}

    Requires: no schedule.
    Ensures: the dimensions of each broadcast ascend.
    Cost: linear.
    Source: XLA's broadcast canonicaliser: emitters then handle one order only.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"broadcast": (_sorted,)}, lambda i: not i.shape.dynamic)


def _sorted(site: RewriteSite) -> HloInstruction | None:
    dims = site.at.dimensions
    if list(dims) == sorted(dims):
        return None
    order = sorted(range(len(dims)), key=dims.__getitem__)
    value = site.build.transpose(site.operands[0], order)
    return site.build.broadcast(value, site.shape.dims, sorted(dims))


class ReshapeDecomposer(ComputationPass):
    """Replaces each reshape by a bitcast, and by a copy where data moves.

    reshape(x: f32[4,6]{0,1}): f32[24]{0}  ->  bitcast(copy(x): f32[4,6]{1,0}): f32[24]{0}

    Requires: layouts are assigned; no schedule.
    Ensures: no reshape is left; only those whose order in memory changes have copies.
    Cost: linear.
    Source: XLA's reshape decomposer.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"reshape": (_decompose,)}, lambda i: not i.shape.dynamic)


def _decompose(site: RewriteSite) -> HloInstruction | None:
    (x,) = site.operands
    source, target = x.shape.filled(), site.shape.filled()
    if is_bitcast(source, target):
        return site.build.add("bitcast", x, shape=target)
    plain, wanted = source.with_default_layout(), target.with_default_layout()
    if is_bitcast(source, wanted):
        return _copied(site, site.build.add("bitcast", x, shape=wanted), target)
    moved = _copied(site, x, plain)
    if is_bitcast(plain, target):
        return site.build.add("bitcast", moved, shape=target)
    return _copied(site, site.build.add("bitcast", moved, shape=wanted), target)


def _copied(site: RewriteSite, value: HloInstruction, shape: Shape) -> HloInstruction:
    return value if value.shape is shape else site.build.add("copy", value, shape=shape)
