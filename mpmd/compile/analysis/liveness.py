"""Live ranges of values, and instructions that may write over their operands.

A value may have several ranges.  The state of a loop is live before and after its body, and inside of it
until its last use: values that the body computes may take its memory from then on.

The result of a conditional is written at the end of whichever branch runs, so its memory is also in use at
the end of each of them, when all results of the branch are copied to their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from mpmd.compile.analysis.dataflow import Dataflow, HloValue
from mpmd.compile.hlo.attributes import OutputAlias
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import ShapeIndex

InPlacePair = tuple[int, ShapeIndex, ShapeIndex]
"""(operand number, position in the operand, position in the result)."""


def in_place_pairs(instruction: HloInstruction) -> list[InPlacePair]:
    """Operands whose memory the result must take.

    dynamic-update-slice and scatter change their operand in place; a fusion does so where its root is one
    of these fed by a parameter; custom calls and fusions may declare it themselves.
    """
    opcode = instruction.opcode
    stated = cast("tuple[OutputAlias, ...]", instruction.attributes.get("output_to_operand_aliasing") or ())
    pairs: list[InPlacePair] = [(a.operand, a.operand_index, a.output_index) for a in stated]
    if opcode in ("dynamic-update-slice", "set-dimension-size"):
        pairs.append((0, (), ()))
    elif opcode == "scatter":
        count = len(instruction.operands) // 2
        pairs += [(i, (), (i,) if count > 1 else ()) for i in range(count)]
    elif opcode == "fusion":
        pairs += [p for p in _fused(instruction) if p not in pairs]
    return pairs


def overwritten_pairs(instruction: HloInstruction) -> list[InPlacePair]:
    """The in-place pairs without those whose operand is read a second time: `scatter(x, i, x)`.

    There the result is computed over a copy.
    """
    return [p for p in in_place_pairs(instruction) if not _is_read_too(instruction, p[0])]


def _is_read_too(instruction: HloInstruction, number: int) -> bool:
    """Whether an operation that changes an operand reads the same array once more."""
    source = _through(instruction.operands[number])
    if any(_through(o) is source for k, o in enumerate(instruction.operands) if k != number):
        return True
    if instruction.opcode != "fusion":
        return False
    value = instruction.to_apply.parameters[number]
    while len(value.users) == 1 and next(iter(value.users)).opcode == "bitcast":
        value = next(iter(value.users))
    return len(value.users) > 1 or any(u.operand_indices(value) != [0] for u in value.users)


def _fused(fusion: HloInstruction) -> list[InPlacePair]:
    root = fusion.to_apply.root
    outputs = list(enumerate(root.operands)) if root.opcode == "tuple" else [(-1, root)]
    pairs: list[InPlacePair] = []
    for position, output in outputs:
        output = _through(output)
        if output.opcode not in ("dynamic-update-slice", "scatter") or output.shape.is_tuple:
            continue
        source = _through(output.operands[0])
        if source.opcode == "parameter" and source.shape.byte_size == output.shape.byte_size:
            pairs.append((source.parameter_number, (), (position,) if position >= 0 else ()))
    return pairs


def _through(value: HloInstruction) -> HloInstruction:
    while value.opcode == "bitcast":
        value = value.operands[0]
    return value


@dataclass(frozen=True, slots=True)
class LiveRange:
    """From the instant a value is defined to its last use, both included."""

    start: int
    end: int

    def meets(self, other: LiveRange) -> bool:
        """Whether there is an instant in both."""
        return self.start <= other.end and other.start <= self.end


class LogicalTime:
    """The instant of every instruction, and when each computation begins and ends.

    Attributes:
        instants: of each instruction that runs as part of the program.
        spans: from the first instant of each computation to the one after its last instruction.  For a branch
            that is an instant of its own, otherwise it is that of the caller or of the end of the program.
        length: number of instants.
    """

    def __init__(self, entry: HloComputation) -> None:
        self.instants: dict[HloInstruction, int] = {}
        self.spans: dict[HloComputation, LiveRange] = {}
        self.length = 0
        self._visit(entry)

    def _visit(self, computation: HloComputation) -> None:
        first = self.length
        order = list(computation) if computation.module.is_scheduled else computation.post_order()
        for instruction in order:
            if instruction.opcode in ("call", "while", "conditional"):
                for callee in instruction.called:
                    self._visit(callee)
                    if instruction.opcode == "conditional":
                        self.length += 1
            self.instants[instruction] = self.length
            self.length += 1
        self.spans[computation] = LiveRange(first, self.length)


class Liveness:
    """Live ranges of all values of a program with a flat call graph.

    Attributes:
        time: the time axis.
        ranges: per value.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self.time = LogicalTime(dataflow.module.entry)
        self.ranges: dict[HloValue, LiveRange] = {v: self._range(v) for v in dataflow.values}

    def _range(self, value: HloValue) -> LiveRange:
        time, entry = self.time, self.dataflow.module.entry
        start = end = time.instants[value.instruction]
        if value.instruction.opcode == "parameter":
            start = time.spans[value.instruction.parent].start
        end = max((end, *(instant for _, instant in self.needs(value))))
        if value.live_out:
            end = time.length
        if value.instruction.opcode == "parameter" and value.instruction.computation is entry:
            end = max(end, time.length if not self._aliased(value) else end)
        return LiveRange(start, end)

    def needs(self, value: HloValue) -> Iterator[tuple[HloInstruction, int]]:
        """Uses of a value's memory, and the instant of each: reads, and forwarding.

        A computation that returns a value, or a loop's condition that is given one, needs it until it ends: a
        loop may run it again.
        """
        time = self.time
        for use in value.uses:
            yield use.instruction, time.instants[use.instruction]
        for instruction, _ in value.positions:
            computation = instruction.parent
            condition = any(
                c.opcode == "while" and c.while_condition is computation for c in computation.callers
            )
            if instruction is computation.root or (condition and instruction.opcode == "parameter"):
                yield instruction, time.spans[computation].end
            for user in instruction.users:
                yield instruction, self.kept_until(instruction, user)

    def kept_until(self, instruction: HloInstruction, user: HloInstruction) -> int:
        """The instant to which a loop or branch that takes a value keeps it: where its computation begins."""
        instants, spans = self.time.instants, self.time.spans
        if user.opcode == "while":
            return spans[user.while_condition].start
        if user.opcode == "conditional":
            taken = [c for c, o in zip(user.called, user.operands[1:]) if o is instruction]
            return max((spans[c].start for c in taken), default=instants[user])
        return -1

    def _aliased(self, value: HloValue) -> bool:
        """True if a result takes the parameter's memory, so that it need not last to the end."""
        number = value.instruction.parameter_number
        module = self.dataflow.module
        taken = any(
            a.parameter == number and a.parameter_index == value.index for a in module.input_output_alias
        )
        return taken or any(
            d.parameter == number and d.parameter_index == value.index for d in module.buffer_donor
        )


def merged(spans: Iterable[LiveRange]) -> tuple[LiveRange, ...]:
    """The same instants as ranges that neither meet nor touch, in order of time."""
    joined: list[LiveRange] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        if joined and span.start <= joined[-1].end + 1:
            joined[-1] = LiveRange(joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return tuple(joined)


class Occupancy:
    """Spans of all values of a scheduled program.

    Attributes:
        dataflow: the values.
        liveness: their live ranges.
        spans: per value, in order of time.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self.liveness = Liveness(dataflow)
        self.instants = self.liveness.time.instants
        self.spans: dict[HloValue, tuple[LiveRange, ...]] = {v: self._spans(v) for v in dataflow.values}

    def _spans(self, value: HloValue) -> tuple[LiveRange, ...]:
        whole = self.liveness.ranges[value]
        if value.is_phi and value.instruction.opcode == "conditional":
            ends = (self.liveness.time.spans[branch].end for branch in value.instruction.called)
            return merged((whole, *(LiveRange(end, end) for end in ends)))
        loop = loop_of(value)
        return (whole,) if loop is None else self._state_spans(value, loop)

    def _state_spans(self, value: HloValue, loop: HloInstruction) -> tuple[LiveRange, ...]:
        """The spans of a loop's state: without the hole from its last use in the body to the body's end."""
        whole, computations = self.liveness.ranges[value], self.liveness.time.spans
        start = min(whole.start, computations[loop.while_condition].start)
        back = self.instants[loop]
        last = max(computations[loop.while_body].start, computations[loop.while_condition].end)
        for instruction, instant in self.liveness.needs(value):
            if _within(instruction, loop.while_body):
                last = max(last, instant)
        return (LiveRange(start, min(last, back)), LiveRange(back, max(whole.end, back)))

    def first(self, value: HloValue) -> int:
        """The first instant."""
        return self.spans[value][0].start

    def last(self, value: HloValue) -> int:
        """The last instant."""
        return self.spans[value][-1].end

    def ends_at(self, value: HloValue, instant: int) -> bool:
        """Whether a span of the value ends at an instant."""
        return any(span.end == instant for span in self.spans[value])

    def together(self, values: Iterable[HloValue]) -> tuple[LiveRange, ...]:
        """When any of several values is live."""
        return merged(s for v in values for s in self.spans[v])

    def conflict(self, a: HloValue, b: HloValue, touching: LiveRange | None = None) -> bool:
        """Whether two values are live at the same time.

        Values may touch in the given span, and where a loop forwards one as its state.
        """
        handed = self._handed_on(a, b)
        for x in self.spans[a]:
            for y in self.spans[b]:
                if x.meets(y):
                    both = LiveRange(max(x.start, y.start), min(x.end, y.end))
                    if both not in (touching, LiveRange(handed, handed)):
                        return True
        return False

    def _handed_on(self, a: HloValue, b: HloValue) -> int:
        """The instant at which a loop's body forwards one value as the state that the other is, or -1."""
        for state, result in ((a, b), (b, a)):
            loop = loop_of(state)
            if loop is not None and self.dataflow.value_at(loop.while_body.root, state.index) is result:
                return self.instants[loop]
        return -1


def loop_of(value: HloValue) -> HloInstruction | None:
    """The loop whose state a value is; None for all others."""
    return value.instruction if value.is_phi and value.instruction.opcode == "while" else None


def _within(instruction: HloInstruction, computation: HloComputation) -> bool:
    """Whether an instruction is in a computation or in one that it calls."""
    at = instruction.parent
    while at is not computation:
        callers = list(at.callers)
        if len(callers) != 1:
            return False
        at = callers[0].parent
    return True
