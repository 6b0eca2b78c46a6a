"""Values that depend on the device alone, computed for each device."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.collective_groups import collective_groups
from mpmd.compile.hlo.evaluator import Evaluator, is_evaluable
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule

_MAX_NEEDED = 64


def per_device(value: HloInstruction) -> list[int] | None:
    """An integer scalar on each device; None if it depends on more than the device."""
    needed: dict[HloInstruction, None] = {}
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if found in needed:
            continue
        needed[found] = None
        if len(needed) > _MAX_NEEDED or not is_evaluable(found):
            return None
        waiting += found.operands
    if not value.shape.is_scalar or not value.shape.info.is_integral:
        return None
    module = value.parent.module
    devices = module.replica_count * module.num_partitions
    scratch = HloModule("positions")
    body = scratch.create_computation("position")
    copies: dict[HloInstruction, HloInstruction] = {}
    for instruction in value.parent.post_order():
        if instruction in needed:
            copies[instruction] = body.add(instruction.clone([copies[o] for o in instruction.operands]))
    body.set_root(copies[value])
    sizes = module.replica_count, module.num_partitions
    with np.errstate(all="ignore"):
        return [int(Evaluator(*sizes, device).run(body, [])) for device in range(devices)]


def own_part(piece: HloInstruction, collective: HloInstruction) -> int | None:
    """The dim along which a dynamic-slice takes each device's own part of a collective's result.

    None unless the slice has, on each device, the part of its position in the group.
    """
    whole = piece.operands[0].shape
    smaller = [d for d, (n, m) in enumerate(zip(whole.dims, piece.shape.dims)) if n != m]
    if len(smaller) != 1:
        return None
    (dim,) = smaller
    module = piece.parent.module
    groups = collective_groups(collective, module.replica_count, module.num_partitions)
    count = len(groups[0])
    size = piece.shape.dims[dim]
    if any(len(g) != count for g in groups) or size * count != whole.dims[dim]:
        return None
    starts = per_device(piece.operands[1 + dim])
    if starts is None:
        return None
    positions = {device: place for group in groups for place, device in enumerate(group)}
    if len(positions) != len(starts):
        return None
    room = whole.dims[dim] - size
    fits = all(min(max(s, 0), room) == positions[device] * size for device, s in enumerate(starts))
    return dim if fits else None
