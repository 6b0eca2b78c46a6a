"""Fewer and smaller collectives: sums are moved to where they carry least, and small ones travel together.

A collective costs a start and its bytes.  Reductions that meet become one, after the sum on each device; a
reduction becomes a reduce-scatter where each device reads its own part; independent collectives of one kind
become one collective of several arrays.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable

import numpy as np

from mpmd.compile.analysis.call_graph import Reachability
from mpmd.compile.hlo.collective_groups import collective_groups
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator, is_evaluable
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.printer import computation_digest
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder, only_user, reducer


class Combiner(ComputationPass):
    """Joins collectives of one opcode; see the passes that derive from it.

    Attributes:
        most_bytes: maximum of the sum of operands, in bytes per device.
        most_operands: maximum of operands of one collective.
    """

    most_bytes: int = 30 << 20
    most_operands: int = 256

    @property
    @abc.abstractmethod
    def opcode(self) -> str:
        """The opcode of the collectives that it joins."""

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return combine(computation, self.opcode, self.most_bytes, self.most_operands)


def combine(computation: HloComputation, opcode: str, most_bytes: int, most_operands: int) -> bool:
    """Join collectives of one opcode that agree in all but their operands and do not need each other.

    They are taken in program order, which is the same on all devices, and so is the order of the results.
    """
    waiting: dict[Hashable, list[HloInstruction]] = {}
    for instruction in computation.post_order():
        if instruction.opcode == opcode and len(instruction.operands) == 1 and not instruction.is_root:
            if not instruction.has_control_edges:
                waiting.setdefault(_key(instruction), []).append(instruction)
    changed = False
    reach: Reachability | None = None
    for candidates in waiting.values():
        while len(candidates) > 1:
            reach = reach or Reachability(computation)
            chosen, candidates = _first_set(candidates, reach, most_bytes, most_operands)
            if len(chosen) > 1:
                reach.update(_join(computation, chosen))
                changed = True
    return changed


def _key(instruction: HloInstruction) -> Hashable:
    called: tuple[bytes, ...] = tuple(computation_digest(c, {}) for c in instruction.called)
    attributes = {k: v for k, v in instruction.attributes.items() if k != "channel_id"}
    return (
        instruction.operands[0].shape.dtype,
        instruction.channel_id is None,
        tuple(sorted(attributes.items(), key=lambda item: item[0])),
        called,
    )


def _first_set(
    candidates: list[HloInstruction], reach: Reachability, most_bytes: int, most_operands: int
) -> tuple[list[HloInstruction], list[HloInstruction]]:
    """The first candidate with those that can join it, and all others."""
    chosen, rest = [candidates[0]], []
    size = candidates[0].operands[0].shape.byte_size
    for candidate in candidates[1:]:
        more = candidate.operands[0].shape.byte_size
        full = size + more > most_bytes or len(chosen) >= most_operands
        if full or any(reach.connected(candidate, other) for other in chosen):
            rest.append(candidate)
        else:
            chosen.append(candidate)
            size += more
    return chosen, rest


def _join(computation: HloComputation, chosen: list[HloInstruction]) -> list[HloInstruction]:
    """Replace collectives by one; returns the new and changed instructions."""
    build = TrackingBuilder(computation)
    first = chosen[0]
    build.metadata = first.metadata
    operands = [i.operands[0] for i in chosen]
    combined = build.like(first, operands, tuple_of([i.shape for i in chosen]))
    for number, instruction in enumerate(chosen):
        part = build.add("get-tuple-element", combined, shape=instruction.shape, index=number)
        computation.replace(instruction, part)
    return [*build.created, *(u for i in build.created for u in i.users)]


class AllGatherCombiner(Combiner):
    """Gathers several arrays from devices at once.

    all-gather(x); all-gather(y)  ->  (x', y') = all-gather(x, y)

    Requires: no schedule.
    Ensures: all-gathers that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of the other collectives is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.
    """

    opcode = "all-gather"


class AllReduceCombiner(Combiner):
    """Reduces several arrays over devices at once.

    all-reduce(x); all-reduce(y)  ->  (x', y') = all-reduce(x, y)

    Requires: no schedule.
    Ensures: all-reduces that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of the other collectives is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.
    """

    opcode = "all-reduce"


class ReduceScatterCombiner(Combiner):
    """Reduces and scatters several arrays at once.

    reduce-scatter(x); reduce-scatter(y)  ->  (x', y') = reduce-scatter(x, y)

    Requires: no schedule.
    Ensures: reduce-scatters that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of the other collectives is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.
    """

    opcode = "reduce-scatter"


_MAX_NEEDED = 64


def per_device(value: HloInstruction) -> list[int] | None:
    """An integer scalar on each device; None if it depends on more than the device."""
    needed: dict[HloInstruction, None] = {}
    waiting = [value]
    while waiting:
        visited = waiting.pop()
        if visited in needed:
            continue
        needed[visited] = None
        if len(needed) > _MAX_NEEDED or not is_evaluable(visited):
            return None
        waiting += visited.operands
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
        rules = dict.fromkeys(("add", "maximum", "minimum"), (_join_reductions,))
        return Rewriter(computation).run(rules, lambda i: True)


def _join_reductions(site: RewriteSite) -> HloInstruction | None:
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
