"""Live ranges with the hole inside of a loop's body.

The state of a loop is live before and after its body, and inside of it until its last use: values that the
body computes may take its memory from then on.

The result of a conditional is written at the end of whichever branch runs, so its memory is also in use at
the end of each of them, when all results of the branch are copied to their memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpmd.compile.analysis.dataflow import Dataflow, HloValue
from mpmd.compile.analysis.liveness import Liveness, LiveRange
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction


def merged(spans: Iterable[LiveRange]) -> tuple[LiveRange, ...]:
    """The same instants as ranges that neither meet nor touch, in order of time."""
    found: list[LiveRange] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        if found and span.start <= found[-1].end + 1:
            found[-1] = LiveRange(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return tuple(found)


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
        for state, made in ((a, b), (b, a)):
            loop = loop_of(state)
            if loop is not None and self.dataflow.value_at(loop.while_body.root, state.index) is made:
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
