"""hlo-all-reduce-folder."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import ReplicaGroups
from mpmd.compile.hlo.collective_groups import collective_groups
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import only_user, reducer


class AllReduceFolder(ComputationPass):
    """Reduces over two sets of devices at once.

    all-reduce(all-reduce(x), groups {{0,1},{2,3}}), groups {{0,2},{1,3}}  ->  all-reduce(x), {{0,1,2,3}}

    Requires: no schedule; groups that list devices, or no channel and one partition.
    Ensures: no all-reduce by the same operation reads one used nowhere else, whose groups cross its own.
    Cost: linear.
    Source: XLA's all-reduce folder.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"all-reduce": (_fold,)}, lambda i: len(i.operands) == 1)


def _fold(site: RewriteSite) -> HloInstruction | None:
    inner = site.operands[0]
    if inner.opcode != "all-reduce" or len(inner.operands) != 1 or only_user(inner) is not site.at:
        return None
    opcode = reducer(site.at.to_apply)
    if opcode is None or opcode != reducer(inner.to_apply) or not _lists_devices(site.at):
        return None
    if not _lists_devices(inner) or (inner.channel_id is None) != (site.at.channel_id is None):
        return None
    module = site.at.parent.module
    first, second = (
        collective_groups(i, module.replica_count, module.num_partitions) for i in (inner, site.at)
    )
    joined = _crossed(first, second)
    if joined is None:
        return None
    return site.build.like(site.at, inner.operands, replica_groups=ReplicaGroups(joined))


def _lists_devices(instruction: HloInstruction) -> bool:
    module = instruction.parent.module
    plain = instruction.channel_id is None and module.num_partitions == 1
    return plain or bool(instruction.attributes.get("use_global_device_ids", False))


def _crossed(
    first: list[tuple[int, ...]], second: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...] | None:
    """Joined groups, where each group of one kind meets each of the other in one device."""
    group_of = {device: group for group in first for device in group}
    joined: dict[tuple[int, ...], None] = {}
    for group in second:
        if any(device not in group_of for device in group):
            return None
        members = sorted(other for device in group for other in group_of[device])
        if len(set(members)) != len(members):
            return None
        joined[tuple(members)] = None
    total = sum(len(g) for g in joined)
    # Each device in one group, and the second groups cover all members of those they join.
    covered = sum(len(g) for g in second)
    return tuple(joined) if total == len(group_of) == covered else None
