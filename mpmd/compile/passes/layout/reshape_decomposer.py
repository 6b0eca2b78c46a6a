"""hlo-reshape-decomposer."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.layout.physical import is_bitcast
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class ReshapeDecomposer(ComputationPass):
    """Replaces each reshape by a bitcast, and by a copy where data moves.

    reshape(x: f32[4,6]{0,1}): f32[24]{0}  ->  bitcast(copy(x): f32[4,6]{1,0}): f32[24]{0}

    Requires: layouts are assigned; no schedule.
    Ensures: no reshape is left; only those whose order in memory changes have copies.
    Cost: linear.
    Source: XLA's reshape decomposer.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
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
    """The value in another order in memory."""
    return value if value.shape is shape else site.build.add("copy", value, shape=shape)
