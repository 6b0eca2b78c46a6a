"""A better order near a good one: what stands in the way at the peak moves to the other side of it."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.schedule.heap import Heap

_MAX_STEPS = 200_000  # instructions simulated, over all tries
_MAX_TRIES = 200


def exchanged(order: list[HloInstruction], heap: Heap) -> list[HloInstruction]:
    """An order that is not worse; the same one if no move makes it better.

    What is allocated before the peak and needed only after it is computed later; what could free something
    and stands after the peak is computed earlier.  Moves are tried one by one, and kept if the order's score
    gets smaller.
    """
    current = heap.simulate(order)
    tries = min(_MAX_TRIES, _MAX_STEPS // max(1, len(order)))
    while tries > 0 and current.profile:
        at = current.profile.index(current.peak)
        found = None
        for moved in _moves(order, at, heap):
            tries -= 1
            tried = heap.simulate(moved)
            if tried.score < current.score:
                found = moved, tried
                break
            if tries <= 0:
                break
        if found is None:
            break
        order, current = found
    return order


def _moves(order: list[HloInstruction], at: int, heap: Heap) -> list[list[HloInstruction]]:
    """Orders that differ in one group of instructions around the place of the peak."""
    places = {instruction: place for place, instruction in enumerate(order)}
    moves: list[tuple[int, list[HloInstruction]]] = []
    for place, instruction in enumerate(order):
        sizes = sum(heap.sizes[v] for v in heap.traffic[instruction].defines)
        if place <= at and sizes:
            later = _sunk(order, place, at)
            if later is not None:
                moves.append((-sizes, later))
        elif place > at:
            freed = sum(heap.sizes[v] for v in heap.traffic[instruction].reads)
            if freed > sizes:
                moves.append((sizes - freed, _hoisted(order, place, at, places)))
    moves.sort(key=lambda m: m[0])
    return [m for _, m in moves[:32]]


def _sunk(order: list[HloInstruction], place: int, at: int) -> list[HloInstruction] | None:
    """The order with an instruction behind the peak, and with it all up to the peak that need it.

    None if what stands at the peak needs it.
    """
    group = {order[place]}
    for instruction in order[place + 1 : at + 1]:
        needed = (*instruction.operands, *instruction.control_predecessors)
        if any(n in group for n in needed):
            group.add(instruction)
    if order[at] in group:
        return None
    stays = [i for i in order[: at + 1] if i not in group]
    return [*stays, *(i for i in order[: at + 1] if i in group), *order[at + 1 :]]


def _hoisted(
    order: list[HloInstruction], place: int, at: int, places: dict[HloInstruction, int]
) -> list[HloInstruction]:
    """The order with an instruction before the peak, and with it what it needs from behind the peak.

    As early as what it needs allows.
    """
    group = {order[place]}
    for instruction in reversed(order[at:place]):
        if any(u in group for u in (*instruction.users, *instruction.control_successors)):
            group.add(instruction)
    if order[at] in group:
        return order
    needed = [places[n] for i in group for n in (*i.operands, *i.control_predecessors) if n not in group]
    first = max(needed, default=-1) + 1
    moved = [i for i in order[at : place + 1] if i in group]
    return [*order[:first], *moved, *(i for i in order[first:] if i not in group)]
