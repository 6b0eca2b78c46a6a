"""Instructions of equal structure put beside each other, so that a target may start them as one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from mpmd.compile.analysis.liveness import in_place_pairs
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.schedule.heap import Heap
from mpmd.errors import PassError
from mpmd.support.passes import Pass

_GIVEN = {"parameter", "constant"}
"""Opcodes of what is there before the first instruction."""
_MOVED = {"get-tuple-element", "bitcast"}
"""Opcodes that stay behind their operand."""
_ALONE = {
    "parameter", "constant", "tuple", "dot", "convolution", "fft", "sort", "while", "conditional", "call",
    "custom-call", "scatter", "cholesky", "triangular-solve",
}  # fmt: skip
"""Opcodes that become no small kernel."""
_GROWTH = 16
"""The peak may grow by one part of so many."""

Order = list[HloInstruction]


class SideBySide(Pass):
    """Puts small instructions that compute alike next to each other, for targets that start them together.

    p = f(x); q = g(p); r = f(y); s = g(r)  ->  p = f(x); r = f(y); q = g(p); s = g(r)

    An instruction may be anywhere between the last of its operands and the first of its users.  Of those with
    equal opcodes and element types, as many as possible get one place: the last that the first of them to be
    needed allows.  Where memory would grow too much, both halves of them are tried, each by itself.

    Requires: the module is scheduled.
    Ensures: operands come before users; the simulated peak grows by a sixteenth at most.
    Cost: one simulation per set of equal instructions that moves, and per half.
    Source: ours; the places are the stabbing of intervals with the fewest points.

    Attributes:
        most_bytes: of the operands and results of an instruction that moves.
    """

    prefix = "hlo-"
    most_bytes: int = 1 << 24

    def run(self, module: HloModule) -> bool:
        """Orders `module` anew; True iff an instruction moved.

        Raises:
            PassError: the module is not scheduled.
        """
        if not module.is_scheduled:
            raise PassError(f"{self.name} needs an order\n  run hlo-memory-schedule first")
        heap, changed, limits = Heap(module), False, {}
        for computation in heap.computations:
            heap.settle(computation, list(computation))
            peak = heap.inside[computation]
            limits[computation] = peak + peak // _GROWTH
        for computation in heap.computations:
            before = list(computation)
            order = self._ordered(before, heap, limits[computation])
            heap.settle(computation, order)
            if order != before:
                computation.reorder(order)
                changed = True
        return changed

    def _ordered(self, order: Order, heap: Heap, limit: int) -> Order:
        order = sorted(order, key=lambda i: not _is_given(i))
        classes: dict[Hashable, Order] = {}
        for instruction in order:
            if self._is_small(instruction):
                classes.setdefault(_structure(instruction), []).append(instruction)
        for alike in classes.values():
            if len(alike) > 1:
                order = _together(order, alike, heap, limit)
        return order

    def _is_small(self, instruction: HloInstruction) -> bool:
        if instruction.opcode in _ALONE | _MOVED or in_place_pairs(instruction):
            return False
        if instruction.has_side_effect or instruction.control_predecessors or instruction.control_successors:
            return False
        inside = instruction.to_apply if instruction.opcode == "fusion" else ()
        if any(i.opcode in _ALONE - _GIVEN - {"tuple"} for i in inside):
            return False
        shapes = [s for value in (*instruction.operands, instruction) for _, s in value.shape.leaves()]
        return sum(s.byte_size for s in shapes) <= self.most_bytes


def _is_given(instruction: HloInstruction) -> bool:
    return instruction.opcode in _GIVEN and not instruction.control_predecessors


def _is_view(instruction: HloInstruction) -> bool:
    """Whether it stays behind its operand, wherever that goes: no control edge keeps it where it is."""
    return instruction.opcode in _MOVED and not instruction.control_predecessors


def _structure(instruction: HloInstruction) -> Hashable:
    """Equal for instructions that compute alike, on arrays of any extents."""
    inside = instruction.to_apply if instruction.opcode == "fusion" else [instruction]
    return tuple((i.opcode, tuple(s.dtype for _, s in i.shape.leaves())) for i in inside)


def _together(order: Order, alike: Sequence[HloInstruction], heap: Heap, limit: int) -> Order:
    """The order with equal instructions at as few places as memory allows."""
    places = {instruction: place for place, instruction in enumerate(order)}
    moved = _moved(order, _points(alike, places))
    now, then = heap.simulate(order), heap.simulate(moved)
    if then.peak <= limit and then.copied <= now.copied:
        return moved
    half = len(alike) // 2
    if half < 2:
        return order
    return _together(_together(order, alike[:half], heap, limit), alike[half:], heap, limit)


def _points(
    alike: Sequence[HloInstruction], places: Mapping[HloInstruction, int]
) -> dict[HloInstruction, int]:
    spans = {i: _span(i, places) for i in alike}
    waiting = sorted(alike, key=lambda i: (spans[i][1], places[i]))
    points: dict[HloInstruction, int] = {}
    while waiting:
        point = spans[waiting[0]][1]
        here = [i for i in waiting if spans[i][0] <= point]
        apart = set(here)
        here = [i for i in here if not _reads(i) & apart]
        points.update((i, point) for i in here)
        waiting = [i for i in waiting if i not in points]
    return points


def _span(instruction: HloInstruction, places: Mapping[HloInstruction, int]) -> tuple[int, int]:
    """The first and the last place behind which an instruction may go."""
    first = max((places[i] for i in _reads(instruction)), default=-1)
    users = [places[i] for i in _read_by(instruction)]
    return first, min(users, default=len(places)) - 1


def _reads(instruction: HloInstruction) -> set[HloInstruction]:
    """What must run before: operands, and those of what stays behind them."""
    operands: set[HloInstruction] = set()
    for operand in instruction.operands:
        operands |= _reads(operand) if _is_view(operand) else {operand}
    return operands


def _read_by(instruction: HloInstruction) -> set[HloInstruction]:
    users: set[HloInstruction] = set()
    for user in instruction.users:
        users |= _read_by(user) if _is_view(user) else {user}
    return users


def _moved(order: Order, points: Mapping[HloInstruction, int]) -> Order:
    """The order with instructions behind others; those at the same place keep their order."""
    behind: dict[int, Order] = {}
    for instruction in order:
        if instruction in points:
            behind.setdefault(points[instruction], []).append(instruction)
    moved: Order = list(behind.get(-1, ()))
    for place, instruction in enumerate(order):
        if instruction not in points and not _is_view(instruction):
            moved.append(instruction)
        moved += behind.get(place, ())
    return _with_views(moved)


def _with_views(order: Order) -> Order:
    """The order with get-tuple-elements and bitcasts directly behind what they read."""
    views_behind: Order = []
    for instruction in order:
        waiting = [instruction]
        while waiting:
            views_behind.append(waiting.pop(0))
            waiting += [user for user in views_behind[-1].users if _is_view(user)]
    return views_behind
