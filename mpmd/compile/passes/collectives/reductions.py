"""Passes that move and replace reductions over devices.

Values that depend on the device alone, computed for each device.
"""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.collective_groups import collective_groups
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator, is_evaluable
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.value_queries import only_user, reducer

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


class AllReduceMover(ComputationPass):
    """Moves reshapes and transposes before all-reduces, so that they fuse with the producer.

    transpose(all-reduce(x))  ->  all-reduce(transpose(x))

    The gradient of a weight is a product, a sum over devices, and a transpose: moved before the sum, the
    transpose costs nothing, as a product writes its result in any order.

    Requires: no schedule; all-reduces are not combined yet.
    Ensures: no reshape or transpose is the only user of an all-reduce of one array.
    Cost: linear in instructions and moves.
    Source: XLA has reshapes of all-gathers moved likewise; the case of all-reduces is ours.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"reshape": (_move,), "transpose": (_move,)}, lambda i: True)


def _move(site: RewriteSite) -> HloInstruction | None:
    reduced = site.operands[0]
    if reduced.opcode != "all-reduce" or len(reduced.operands) != 1 or only_user(reduced) is not site.at:
        return None
    if reduced.has_control_edges or site.shape.dynamic:
        return None
    moved = site.same(reduced.operands[0], shape=site.shape)
    return site.build.like(reduced, (moved,), site.shape)


class AllReduceReassociate(ComputationPass):
    """Adds on each device before it adds over devices.

    add(all-reduce(x), all-reduce(y)) by add  ->  all-reduce(add(x, y))

    Requires: no schedule; the order of a sum over devices is not fixed to begin with.
    Ensures: no sum, maximum or minimum joins two all-reduces by it that are used nowhere else.
    Cost: linear.
    Source: XLA's pass of that name.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rules = dict.fromkeys(("add", "maximum", "minimum"), (_join,))
        return Rewriter(computation).run(rules, lambda i: True)


def _join(site: RewriteSite) -> HloInstruction | None:
    a, b = site.operands
    if a is b or a.opcode != "all-reduce" or b.opcode != "all-reduce":
        return None
    if len(a.operands) != 1 or len(b.operands) != 1 or {only_user(a), only_user(b)} != {site.at}:
        return None
    if a.has_control_edges or b.has_control_edges:
        return None
    alike = all(
        a.attributes.get(k) == b.attributes.get(k)
        for k in ("replica_groups", "use_global_device_ids", "constrain_layout")
    )
    if not alike or (a.channel_id is None) != (b.channel_id is None):
        return None
    if {reducer(a.to_apply), reducer(b.to_apply)} != {site.at.opcode}:
        return None
    inner = site.build.add(site.at.opcode, a.operands[0], b.operands[0])
    return site.build.like(a, [inner])


class ReduceScatterCreator(ComputationPass):
    """Lets each device have only the part of a reduction that it uses.

    dynamic-slice(all-reduce(x), position * size)  ->  reduce-scatter(x)

    Requires: no schedule.
    Ensures: no all-reduce is left whose only user takes each device's own part of one dim.
    Cost: linear; positions are computed for each device.
    Source: XLA's pass of that name; where a part begins is found by evaluating its start on every device.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"dynamic-slice": (_create,)}, lambda i: True)


def _create(site: RewriteSite) -> HloInstruction | None:
    whole = site.operands[0]
    if whole.opcode != "all-reduce" or len(whole.operands) != 1 or only_user(whole) is not site.at:
        return None
    if whole.has_control_edges:
        return None
    dim = own_part(site.at, whole)
    if dim is None:
        return None
    return site.build.add(
        "reduce-scatter",
        whole.operands[0],
        shape=site.shape,
        called=whole.called,
        dimensions=(dim,),
        channel_id=whole.channel_id,
        replica_groups=whole.attributes.get("replica_groups"),
        constrain_layout=whole.attributes.get("constrain_layout", False),
        use_global_device_ids=whole.attributes.get("use_global_device_ids", False),
    )
