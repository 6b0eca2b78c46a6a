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


def check_collective(instruction: HloInstruction, replicas: int, partitions: int) -> str:
    """How the groups of a collective do not fit it and the module's devices; "" if they do.

    A count of one may mean that it was not set, as in XLA: it is not compared.
    """
    listed = instruction.replica_groups
    channeled = instruction.channel_id is not None
    joined = instruction.opcode not in _PARTITION_WHEN_CHANNELED
    count, each = replicas, 1
    if instruction.attributes.get("use_global_device_ids", False):
        if not channeled:
            return "use_global_device_ids needs a channel_id"
        count = replicas * partitions
    elif channeled:
        count, each = (replicas, partitions) if joined else (partitions, 1)
    groups = listed.groups(count)
    ids = sorted(i for group in groups for i in group)
    if not all(groups) or ids != list(range(len(ids))):
        return f"replica_groups must name each of 0 to n-1 once, in groups that are not empty, got {listed}"
    if count not in (1, len(ids)):
        return f"replica_groups must name {count} ids, got {listed}"
    size = len(groups[0]) * each
    ratio = _ratio(instruction)
    if size not in (1, ratio) and ratio is not None:
        return f"groups of {size} devices do not fit {instruction.operands[0].shape} -> {instruction.shape}"
    return ""


def _ratio(instruction: HloInstruction) -> int | None:
    """How many times as long a gather makes a dim, or a scatter divides it by."""
    scatters = instruction.opcode == "reduce-scatter"
    if not scatters and instruction.opcode not in ("all-gather", "all-gather-start"):
        return None
    large, small = instruction.operands[0].shape, instruction.shape
    while small.is_tuple:  # of a start: (operands, results)
        small = small.elements[
            1 if instruction.opcode.endswith("start") and small is instruction.shape else 0
        ]
    if not scatters:
        large, small = small, large
    (dim,) = instruction.dimensions
    return large.dims[dim] // small.dims[dim] if small.dims[dim] else None


def permute_pairs(instruction: HloInstruction, replicas: int, partitions: int) -> list[tuple[int, int]]:
    listed = cast(tuple[Ints, ...], instruction.attributes["source_target_pairs"])
    if instruction.channel_id is not None:
        return [(r * partitions + s, r * partitions + t) for r in range(replicas) for s, t in listed]
    return [(s * partitions + p, t * partitions + p) for p in range(partitions) for s, t in listed]
