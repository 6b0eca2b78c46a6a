"""Rewriting one computation by local rules, with a worklist; and what rules ask about values.

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

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.values import SIMPLE, identity_of, simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape

_SPLAT_LIMIT = 1024


def literal_of(value: HloInstruction) -> np.ndarray | None:
    """The array of a constant; None for everything else."""
    literal = value.literal
    return literal if isinstance(literal, np.ndarray) else None


def splat(value: HloInstruction) -> Any:
    """The NumPy scalar that all elements of a value equal, bit for bit; None if that is not evident."""
    while value.opcode in ("broadcast", "reshape", "bitcast", "copy", "transpose"):
        value = value.operands[0]
        if not value.shape.is_array:
            return None
    literal = literal_of(value)
    if literal is None or not 0 < literal.size <= _SPLAT_LIMIT:
        return None
    flat = literal.reshape(-1)
    first = flat[0]
    if flat.size == 1:
        return first
    data = np.ascontiguousarray(flat).tobytes()
    return first if data == data[: flat.itemsize] * flat.size else None


def integer(value: HloInstruction) -> int | None:
    """The integer of a scalar or splat of integers."""
    number = splat(value)
    if number is None or not (value.shape.info.is_integral or value.shape.dtype == "pred"):
        return None
    return int(number)


def is_splat(value: HloInstruction, number: float) -> bool:
    """True if all elements equal `number`; both zeros equal 0."""
    element = splat(value)
    return element is not None and bool(element == number)


def is_negative_zero(value: HloInstruction) -> bool:
    """True if all elements are -0.0."""
    if value.shape.info.kind != "float":
        return False
    number = splat(value)
    return number is not None and bool(number == 0) and bool(np.signbit(np.float64(number)))


def is_number(value: HloInstruction) -> bool:
    """True for floats and complex numbers: arithmetic rounds, and NaN exists."""
    return value.shape.info.kind in ("float", "complex")


def only_user(value: HloInstruction) -> HloInstruction | None:
    """The one instruction that reads a value which is not the result of its computation."""
    if len(value.users) != 1 or value.is_root:
        return None
    return next(iter(value.users))


def reducer(computation: HloComputation) -> str | None:
    """The opcode of a computation `(a, b) -> opcode(a, b)` on scalars."""
    return simple_opcode(computation)


def is_identity(opcode: str, value: HloInstruction) -> bool:
    """True if combining with `value` changes nothing (but the sign of a zero, for add)."""
    number = splat(value)
    if number is None or opcode not in SIMPLE:
        return False
    return bool(number == identity_of(opcode, value.shape.dtype))


def inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    out = [0] * len(permutation)
    for i, p in enumerate(permutation):
        out[p] = i
    return tuple(out)


def is_trivial(value: HloInstruction) -> bool:
    """True for an array without elements."""
    return value.shape.is_array and 0 in value.shape.dims


class TrackingBuilder(HloBuilder):
    """A builder that records the instructions it adds.

    Attributes:
        created: instructions in order of creation; emptied by the reader.
    """

    def __init__(self, computation: HloComputation) -> None:
        super().__init__(computation)
        self.created: list[HloInstruction] = []

    def added(self, instruction: HloInstruction) -> None:
        self.created.append(instruction)

    def like(
        self,
        template: HloInstruction,
        operands: Sequence[HloInstruction],
        shape: Shape | None = None,
        **changed: Any,
    ) -> HloInstruction:
        """A template's operation on other operands, some attributes changed; shape inferred or given."""
        attributes: dict[str, Any] = {**template.attributes, **changed}
        instruction = self.add(template.opcode, *operands, shape=shape, called=template.called, **attributes)
        instruction.frontend_attributes = template.frontend_attributes
        return instruction


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
        added, self.build.created = self.build.created, []
        affected = list(old.users)
        operands = list(old.operands)
        self.computation.replace(old, value)
        for operand in operands:
            remove_unused(operand)
        self.push(added)
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
        candidate = waiting.pop()
        computation = candidate.computation
        if computation is None or not is_dead(candidate):
            continue
        operands = list(dict.fromkeys(candidate.operands))
        computation.remove(candidate)
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
