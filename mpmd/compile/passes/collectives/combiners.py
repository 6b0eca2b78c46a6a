"""Passes that combine collectives of one kind into one."""

from __future__ import annotations

import abc
from collections.abc import Hashable

from mpmd.compile.analysis.call_graph import Reachability
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.printer import computation_digest
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import TrackingBuilder


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
        """That of the collectives."""

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
    made = build.like(first, operands, tuple_of([i.shape for i in chosen]))
    for number, instruction in enumerate(chosen):
        part = build.add("get-tuple-element", made, shape=instruction.shape, index=number)
        computation.replace(instruction, part)
    return [*build.made, *(u for i in build.made for u in i.users)]


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
