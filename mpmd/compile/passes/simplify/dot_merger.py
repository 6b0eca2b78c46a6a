"""hlo-dot-merger."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from mpmd.compile.analysis.reachability import Reachability
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import TrackingBuilder, remove_unused


@dataclasses.dataclass(frozen=True)
class DotMerger(ComputationPass):
    """Multiplies several matrices with a shared one at once.

    dot(x, a: [k,m]); dot(x, b: [k,n])  ->  slices of dot(x, concatenate(a, b))

    Requires: no schedule.
    Ensures: dots that share a side, agree in all but the size of the other side's one free dim, and do not
        depend on each other are one, up to `max_bytes`.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's dot merger.

    Attributes:
        max_bytes: largest dot that is merged: bytes of the other side and the result together.
    """

    name = "hlo-dot-merger"
    max_bytes: int = 32 << 20

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        groups: dict[tuple[int, Hashable], list[HloInstruction]] = {}
        for instruction in computation.post_order():
            if self._is_mergeable(instruction):
                for side in (0, 1):
                    key = _key(instruction, side)
                    if key is not None:
                        groups.setdefault((side, key), []).append(instruction)
        wanted = [(side, dots) for (side, _), dots in groups.items() if len(dots) > 1]
        if not wanted:
            return False
        reach = Reachability(computation)
        changed = False
        for side, dots in wanted:
            chosen = _independent([d for d in dots if d.computation is not None], reach)
            if len(chosen) > 1:
                reach.update(_merge(computation, chosen, side))
                changed = True
        return changed

    def _is_mergeable(self, dot: HloInstruction) -> bool:
        if dot.opcode != "dot" or len(dot.operands) != 2 or dot.is_root:
            return False
        if dot.has_control_edges:
            return False
        return dot.shape.byte_size + min(o.shape.byte_size for o in dot.operands) <= self.max_bytes


def _key(dot: HloInstruction, side: int) -> Hashable | None:
    """The common properties of dots with a shared operand; None unless the other side has one free dim."""
    other = dot.operands[1 - side]
    free = _free_dim(dot, 1 - side)
    if free is None:
        return None
    rest = (*other.shape.dims[:free], -1, *other.shape.dims[free + 1 :])
    attributes = tuple(sorted(dot.attributes.items(), key=lambda item: item[0]))
    return dot.operands[side].uid, rest, other.shape.dtype, dot.shape.dtype, attributes


def _free_dim(dot: HloInstruction, side: int) -> int | None:
    rank = dot.operands[side].shape.rank
    free = dot.dot_dims.rhs_free(rank) if side else dot.dot_dims.lhs_free(rank)
    return free[0] if len(free) == 1 else None


def _independent(dots: list[HloInstruction], reach: Reachability) -> list[HloInstruction]:
    """Dots none of which depends on another one."""
    chosen: list[HloInstruction] = []
    for dot in dots:
        if not any(reach.connected(dot, other) for other in chosen):
            chosen.append(dot)
    return chosen


def _merge(computation: HloComputation, dots: list[HloInstruction], side: int) -> list[HloInstruction]:
    """Replace the dots by slices of one; returns the new and changed instructions."""
    build = TrackingBuilder(computation)
    build.metadata = dots[0].metadata
    free = _free_dim(dots[0], 1 - side)
    assert free is not None
    others = build.concatenate([d.operands[1 - side] for d in dots], free)
    shared = dots[0].operands[side]
    # The result's dims: batch, free dims of the left, free dims of the right side.
    place = dots[0].shape.rank - 1 if side == 0 else len(dots[0].dot_dims.lhs_batch)
    dims = list(dots[0].shape.dims)
    dims[place] = sum(d.shape.dims[place] for d in dots)
    shape = dots[0].shape.with_dims(dims)
    whole = build.like(dots[0], (shared, others) if side == 0 else (others, shared), shape)
    offset = 0
    for dot in dots:
        size = dot.shape.dims[place]
        starts = [offset if d == place else 0 for d in range(len(dims))]
        limits = [offset + size if d == place else n for d, n in enumerate(dims)]
        part = build.slice(whole, starts, limits)
        dot.replace_all_uses_with(part)
        remove_unused(dot)
        offset += size
    return [*build.made, *(u for i in build.made for u in i.users)]
