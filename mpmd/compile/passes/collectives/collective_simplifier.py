"""hlo-collective-simplifier."""

from __future__ import annotations

from mpmd.compile.hlo.collective_groups import collective_groups, permute_pairs
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule
from mpmd.compile.passes.values import is_number, reducer, splat

_ALONE = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-broadcast")


class CollectiveSimplifier(ComputationPass):
    """Removes communication that changes nothing.

    all-reduce(x) in groups of one device -> x;  all-reduce(constant) by max -> constant
    collective-permute(x) from each device to itself -> x

    Requires: no schedule.
    Ensures: each collective joins two devices at least; only products reduce a constant.
    Cost: linear.
    Source: XLA's all-reduce simplifier and trivial cases of the others.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules: dict[str, tuple[Rule, ...]] = dict.fromkeys(_ALONE, (_alone,))
        rules["all-reduce"] = (_alone, _of_constant)
        rules["collective-permute"] = (_to_itself,)
        return Rewriter(computation).run(rules, lambda i: True)


def _groups(instruction: HloInstruction) -> list[tuple[int, ...]]:
    module = instruction.parent.module
    return collective_groups(instruction, module.replica_count, module.num_partitions)


def _unchanged(site: RewriteSite) -> HloInstruction:
    return site.build.tuple(site.operands) if site.shape.is_tuple else site.operands[0]


def _alone(site: RewriteSite) -> HloInstruction | None:
    module = site.at.parent.module
    groups = _groups(site.at)
    # A device in no group would get zeros.
    everywhere = len(groups) == module.replica_count * module.num_partitions
    return _unchanged(site) if everywhere and all(len(g) == 1 for g in groups) else None


def _of_constant(site: RewriteSite) -> HloInstruction | None:
    """A constant is the same on all devices."""
    if len(site.operands) != 1 or splat(site.operands[0]) is None:
        return None
    (x,) = site.operands
    opcode, groups = reducer(site.at.to_apply), _groups(site.at)
    if opcode in ("maximum", "minimum", "and", "or"):
        return x
    count = len(groups[0])
    if opcode != "add" or any(len(g) != count for g in groups):
        return None
    if is_number(x) and count > 128:
        return None
    return site.build.add("multiply", x, site.build.full(count, x.shape.dtype, x.shape.dims))


def _to_itself(site: RewriteSite) -> HloInstruction | None:
    module = site.at.parent.module
    pairs = permute_pairs(site.at, module.replica_count, module.num_partitions)
    everywhere = len(pairs) == module.replica_count * module.num_partitions
    return _unchanged(site) if everywhere and all(a == b for a, b in pairs) else None
