"""Rewriting one computation by local rules, with a worklist.

A rule takes an instruction and returns its replacement:

    def rule(site: RewriteSite) -> HloInstruction | None

It builds instructions with `site.build` and returns the value that replaces the instruction; None if it
does not apply, in which case it must not have built anything.  After a replacement the users of the value
and the new instructions are visited again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape


class TrackingBuilder(HloBuilder):
    """A builder that records the instructions it adds.

    Attributes:
        made: instructions in order of creation; emptied by the reader.
    """

    def __init__(self, computation: HloComputation) -> None:
        super().__init__(computation)
        self.made: list[HloInstruction] = []

    def added(self, made: HloInstruction) -> None:
        self.made.append(made)

    def like(
        self,
        template: HloInstruction,
        operands: Sequence[HloInstruction],
        shape: Shape | None = None,
        **changed: Any,
    ) -> HloInstruction:
        """A template's operation on other operands, some attributes changed; shape inferred or given."""
        attributes: dict[str, Any] = {**template.attributes, **changed}
        made = self.add(template.opcode, *operands, shape=shape, called=template.called, **attributes)
        made.frontend_attributes = template.frontend_attributes
        return made


class Rewriter:
    """Applies rules to a computation until none applies any more.

    Attributes:
        computation: the computation.
        build: builder for new instructions.
        changed: whether anything was changed.
    """

    def __init__(self, computation: HloComputation) -> None:
        self.computation = computation
        self.build = TrackingBuilder(computation)
        self.changed = False
        self._rules: Mapping[str, Sequence[Rule]] = {}
        self._waiting: deque[HloInstruction] = deque()
        self._queued: set[HloInstruction] = set()

    def run(self, rules: Mapping[str, Sequence[Rule]], allowed: Callable[[HloInstruction], bool]) -> bool:
        """Rewrite from the operands to the users, with the rules of each opcode in turn.

        Args:
            rules: by opcode.
            allowed: which instructions may be rewritten.
        """
        if not any(instruction.opcode in rules for instruction in self.computation):
            return self.changed
        self._rules = rules
        self.push(self.computation.post_order())
        while self._waiting:
            instruction = self._waiting.popleft()
            self._queued.discard(instruction)
            if instruction.computation is not None and allowed(instruction):
                self._visit(instruction, rules[instruction.opcode])
        return self.changed

    def push(self, instructions: Iterable[HloInstruction]) -> None:
        """Visit these again, where there are rules for them."""
        for instruction in instructions:
            if instruction.opcode in self._rules and instruction not in self._queued:
                self._queued.add(instruction)
                self._waiting.append(instruction)

    def _visit(self, instruction: HloInstruction, rules: Sequence[Rule]) -> None:
        self.build.metadata = instruction.metadata
        site = RewriteSite(instruction, self.build)
        for rule in rules:
            value = rule(site)
            if value is not None:
                self.replace(instruction, value)
                return

    def replace(self, old: HloInstruction, value: HloInstruction) -> None:
        """Replace `old` by `value`, remove unused instructions, queue those that may change now."""
        self.changed = True
        made, self.build.made = self.build.made, []
        affected = list(old.users)
        operands = list(old.operands)
        self.computation.replace(old, value)
        for operand in operands:
            remove_unused(operand)
        self.push(made)
        self.push([value])
        self.push(u for o in operands if o.computation is not None for u in o.users)
        self.push(affected)


class RewriteSite:
    """An instruction for rules to match, and the builder of its replacement."""

    __slots__ = ("at", "build")

    def __init__(self, at: HloInstruction, build: TrackingBuilder) -> None:
        self.at = at
        self.build = build

    @property
    def shape(self) -> Shape:
        return self.at.shape

    @property
    def operands(self) -> list[HloInstruction]:
        return self.at.operands

    def same(self, *operands: HloInstruction, shape: Shape | None = None, **changed: Any) -> HloInstruction:
        """The same operation on other operands, with some attributes changed; shape inferred or given."""
        return self.build.like(self.at, operands, shape, **changed)


Rule = Callable[[RewriteSite], "HloInstruction | None"]
"""The replacement of an instruction, or None."""


def remove_unused(value: HloInstruction) -> None:
    """Take out an unused instruction, then its operands that become unused."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        computation = found.computation
        if computation is None or not is_dead(found):
            continue
        operands = list(dict.fromkeys(found.operands))
        computation.remove(found)
        waiting += operands


def is_dead(instruction: HloInstruction) -> bool:
    """True if nothing depends on the instruction: not on its value, effect or order."""
    return not (
        instruction.users
        or instruction.opcode == "parameter"
        or instruction.is_root
        or (instruction.control_successors and instruction.control_predecessors)
        or instruction.has_side_effect
    )
