"""Trip counts of loops."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.passes.values import integer

_FLIPPED = {"EQ": "EQ", "NE": "NE", "GE": "LE", "GT": "LT", "LE": "GE", "LT": "GT"}


@dataclass(frozen=True)
class Counter:
    """The counter of a loop.

    Attributes:
        index: the number of its element of the state.
        start: its first value.
        step: the increment in the body.
        trips: the number of iterations.
    """

    index: int
    start: int
    step: int
    trips: int


def counter_of(loop: HloInstruction) -> Counter | None:
    """The counter of a loop such as `i = 0; while i < 10: i = i + 1`; None if it is of another form."""
    test = loop.while_condition.root
    if test.opcode != "compare":
        return None
    a, b = test.operands
    direction = test.direction
    if integer(a) is not None:
        a, b, direction = b, a, _FLIPPED[direction]
    limit = integer(b)
    index = _element(a, loop.while_condition.parameters[0])
    if limit is None or index is None or not a.shape.is_scalar:
        return None
    init, following = loop.operands[0], loop.while_body.root
    if init.opcode != "tuple" or following.opcode != "tuple":
        return None
    start = integer(init.operands[index])
    step = _step(following.operands[index], loop.while_body.parameters[0], index)
    if start is None or step is None or step == 0:
        return None
    trips = _trips(start, step, limit, direction)
    if trips is None:
        return None
    info = a.shape.info
    low, high = integer_range(info.name)
    return Counter(index, start, step, trips) if low <= start + trips * step <= high else None


def _element(value: HloInstruction, state: HloInstruction) -> int | None:
    reads = value.opcode == "get-tuple-element" and value.operands[0] is state
    return value.tuple_index if reads else None


def _step(value: HloInstruction, state: HloInstruction, index: int) -> int | None:
    """The increment of an element, if that is its only change."""
    if value.opcode not in ("add", "subtract"):
        return None
    a, b = value.operands
    if value.opcode == "add" and integer(a) is not None:
        a, b = b, a
    amount = integer(b)
    if amount is None or _element(a, state) != index:
        return None
    return -amount if value.opcode == "subtract" else amount


def _trips(start: int, step: int, limit: int, direction: str) -> int | None:
    """How often `start + k * step` satisfies the comparison with the limit before it first does not."""
    if direction == "NE":
        distance = limit - start
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction == "EQ":
        return 1 if start == limit else 0
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
    rising = direction in ("LT", "LE")
    if (start >= limit) if rising else (start <= limit):
        return 0
    if (step > 0) != rising:
        return None
    return -(-(limit - start) // step)
