"""Where two bf16 values may cancel, and a kernel knows one more exactly than the other.

    g - sum(f32(g) * p)    g is not rounded in the difference, but on its way to the sum

If all values are rounded, or none is, this is zero where a row has one weight of 1.  If one side alone is
rounded, it is what rounding took from g, as large as true gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planning.trace import MOVEMENT
from mpmd.compile.kernels.precision import NARROW_TYPE
from mpmd.compile.passes.values import splat

_CANCELLING = frozenset(("add", "subtract", "log", "log-plus-one"))
"""Operations with a zero, or a pole, where operands are about equal or about one."""
_MOVES = MOVEMENT | {"concatenate", "pad"}


@dataclass(frozen=True)
class _InexactSources:
    """The inexact values on which one depends, as bits.

    Attributes:
        wide: those that a kernel may have in f32 there.
        rounded: those that something on the way rounds.
    """

    wide: int = 0
    rounded: int = 0

    def __or__(self, other: _InexactSources) -> _InexactSources:
        return _InexactSources(self.wide | other.wide, self.rounded | other.rounded)


def may_cancel(
    computation: HloComputation,
    is_inexact: Callable[[HloInstruction], bool],
    is_start: Callable[[HloInstruction], bool],
) -> Iterator[HloInstruction]:
    """Instructions whose operands may cancel, though a value that both depend on is rounded for one alone.

    Args:
        computation: where to look.
        is_inexact: whether a kernel may know a value more exactly than its type does.
        is_start: whether a value is far from its operands, so that nothing cancels with them.
    """
    known: dict[HloInstruction, _InexactSources] = {}
    bit = 1
    for instruction in computation.post_order():
        found = _InexactSources()
        if not is_start(instruction):
            for operand in instruction.operands:
                found |= known[operand]
            if _cancels(instruction, known):
                yield instruction
        if _rounds(instruction):
            found = _InexactSources(0, found.wide | found.rounded)
        if is_inexact(instruction):
            found |= _InexactSources(bit)
            bit <<= 1
        known[instruction] = found


def _rounds(instruction: HloInstruction) -> bool:
    """Whether operands are rounded, as their value is in memory or converted."""
    if instruction.opcode == "convert":
        return NARROW_TYPE in (instruction.shape.dtype, instruction.operands[0].shape.dtype)
    return not instruction.is_elementwise and instruction.opcode not in _MOVES


def _cancels(instruction: HloInstruction, known: dict[HloInstruction, _InexactSources]) -> bool:
    if instruction.opcode not in _CANCELLING or instruction.shape.dtype != NARROW_TYPE:
        return False
    varying = [known[o] for o in instruction.operands if splat(o) is None]
    if not varying:
        return False
    a, b = varying[0], varying[-1]  # twice the same beside a constant: 1 - p of a p that is about one
    return bool(a.wide & b.rounded | a.rounded & b.wide)
