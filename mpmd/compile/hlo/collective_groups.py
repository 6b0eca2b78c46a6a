"""The devices of each group of a collective.

Devices are numbered replica by replica: device = replica x partitions + partition.
"""

from __future__ import annotations

from typing import cast

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError

_PARTITION_WHEN_CHANNELED = frozenset(
    [
        "all-to-all",
        "ragged-all-to-all",
        "collective-broadcast",
        "collective-permute",
        "collective-permute-start",
    ]
)


def collective_groups(instruction: HloInstruction, replicas: int, partitions: int) -> list[tuple[int, ...]]:
    """Groups of device numbers, each in the order in which the collective counts its members.

    Without channel the listed ids are replicas, and each partition communicates by itself.  With a channel,
    all-to-all and broadcasts list partitions, and reductions and gathers list replicas and join all
    partitions, unless `use_global_device_ids` says that the ids are devices.

    Raises:
        HloError: a group names a device that does not exist, or twice.
    """
    channeled = instruction.channel_id is not None
    listed = instruction.replica_groups
    if instruction.attributes.get("use_global_device_ids", False):
        groups = list(listed.groups(replicas * partitions))
    elif channeled and instruction.opcode in _PARTITION_WHEN_CHANNELED:
        groups = [
            tuple(r * partitions + p for p in group)
            for r in range(replicas)
            for group in listed.groups(partitions)
        ]
    elif channeled:
        groups = [
            tuple(r * partitions + p for r in group for p in range(partitions))
            for group in listed.groups(replicas)
        ]
    else:
        groups = [
            tuple(r * partitions + p for r in group)
            for p in range(partitions)
            for group in listed.groups(replicas)
        ]
    seen: set[int] = set()
    for device in (d for group in groups for d in group):
        if not 0 <= device < replicas * partitions or device in seen:
            raise HloError(
                f"{instruction.name}: groups {listed} name device {device}, which is unknown or named twice"
            )
        seen.add(device)
    return groups


def permute_pairs(instruction: HloInstruction, replicas: int, partitions: int) -> list[tuple[int, int]]:
    """(source, target) devices of a collective-permute."""
    listed = cast(tuple[Ints, ...], instruction.attributes["source_target_pairs"])
    if instruction.channel_id is not None:
        return [(r * partitions + s, r * partitions + t) for r in range(replicas) for s, t in listed]
    return [(s * partitions + p, t * partitions + p) for p in range(partitions) for s, t in listed]
