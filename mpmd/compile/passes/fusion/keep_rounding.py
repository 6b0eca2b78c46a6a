"""Rounding that a program depends on, kept where kernels would compute with more exact values.

Two bf16 values may cancel, and a kernel may know one more exactly than the other:

    g - sum(f32(g) * p)    g is not rounded in the difference, but on its way to the sum

If all values are rounded, or none is, this is zero where a row has one weight of 1.  If one side alone is
rounded, it is what rounding took from g, as large as true gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.analysis.dataflow import Position
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.values import simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex
from mpmd.compile.kernels.operations import NARROW
from mpmd.compile.kernels.planner.elements import MOVEMENT
from mpmd.compile.kernels.precision import ABRUPT, EXACT, NARROW_TYPE, WIDE_TYPE
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.compile.passes.rewriter import splat

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
        sources = _InexactSources()
        if not is_start(instruction):
            for operand in instruction.operands:
                sources |= known[operand]
            if _cancels(instruction, known):
                yield instruction
        if _rounds(instruction):
            sources = _InexactSources(0, sources.wide | sources.rounded)
        if is_inexact(instruction):
            sources |= _InexactSources(bit)
            bit <<= 1
        known[instruction] = sources


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


_OPAQUE = frozenset(("convolution", "custom-call", "dot", "fusion", "ragged-dot", "scaled-dot"))
"""Their sums have an order of their own: no two programs have the same bits behind them."""
_REDUCING = frozenset(("reduce", "reduce-window"))


class KeepRounding(HloPass):
    """Rounds each bf16 value from which something discrete is made, or that may cancel, as the program says.

    y = multiply(x, s); q = convert(y + b): s8  ->  r = convert(convert(y): f32): bf16; q = convert(r + b): s8

    Kernels compute bf16 in f32 and round where a conversion says so.  A difference in the last place stays
    small behind smooth operations, but not behind a comparison, a rounding to integers, the bits of a value
    or a sort: there it is another bucket, another branch, or no maximum at all.  Nor does it stay small
    where values cancel of which one is rounded, the other one not (`cancellation.py`).  So the chains to
    these keep every rounding, for all their users.  Chains begin at products, whose sums have an order of
    their own.

    Requires: no `call`; simplified, as the simplifier takes the pairs of conversions away; no fusions.
    Ensures: discrete values, and differences of values that cancel, depend on bf16 values that are rounded
        after each operation.
    Cost: linear.
    Source: ours; XLA's excess precision is by switch for a whole program.
    """

    def rewrite(self, module: HloModule) -> bool:
        changed = False
        for value in _to_round(module):
            if _is_inexact(value) and not _is_rounded_anyway(value):
                _round(value)
                changed = True
        return changed


def _to_round(module: HloModule) -> list[HloInstruction]:
    """Instructions on which something discrete or cancelling depends, through tuples, loops and branches."""
    waiting: list[Position] = [
        (operand, ())
        for computation in CallGraph(module).sequential()
        for instruction in (*filter(is_discrete, computation.post_order()), *_cancelling(computation))
        for operand in instruction.operands
    ]
    seen: dict[Position, None] = {}
    while waiting:
        position = waiting.pop()
        if position not in seen:
            seen[position] = None
            waiting += _sources(*position)
    return list(dict.fromkeys(instruction for instruction, _ in seen))


def is_discrete(instruction: HloInstruction) -> bool:
    """Whether a small difference of its operands may become a large one."""
    opcode, kinds = instruction.opcode, [o.shape for o in instruction.operands if o.shape.is_array]
    if not any(shape.info.kind == "float" for shape in kinds):
        return False
    if opcode == "convert":
        return instruction.shape.info.kind != "float" or instruction.shape.dtype in NARROW
    if opcode in _REDUCING:  # an extreme is compared with its operands, if not here, in a backward pass
        return simple_opcode(instruction.to_apply) not in ("add", "multiply")
    return opcode in ABRUPT or opcode in ("bitcast-convert", "compare", "sort")


def _sources(instruction: HloInstruction, index: ShapeIndex) -> Iterator[Position]:
    opcode = instruction.opcode
    if opcode == "get-tuple-element":
        yield instruction.operands[0], (instruction.tuple_index, *index)
    elif opcode in ("tuple", "sort") and index:
        yield instruction.operands[index[0]], index[1:]
    elif opcode == "while":
        yield from ((instruction.operands[0], index), (instruction.while_body.root, index))
    elif opcode == "conditional":
        yield from ((branch.root, index) for branch in instruction.called)
    elif opcode == "parameter":
        assert instruction.computation is not None
        for caller in instruction.computation.callers:
            if caller.opcode == "while":
                yield caller, index
            elif caller.opcode == "conditional":
                branches = [k for k, c in enumerate(caller.called) if c is instruction.computation]
                yield from ((caller.operands[1 + k], index) for k in branches)
    elif opcode not in _OPAQUE:
        yield from ((operand, ()) for operand in instruction.operands if operand.shape.is_array)


def _cancelling(computation: HloComputation) -> Iterator[HloInstruction]:
    return may_cancel(computation, _is_inexact, lambda i: i.opcode in _OPAQUE)


def _is_inexact(value: HloInstruction) -> bool:
    """Whether kernels may know a value more exactly than its type does."""
    if not value.shape.is_array or value.shape.dtype != NARROW_TYPE:
        return False
    if value.opcode in _REDUCING:
        return simple_opcode(value.to_apply) in ("add", "multiply")
    return value.is_elementwise and value.opcode not in (*EXACT, "convert", "bitcast-convert")


def _is_rounded_anyway(value: HloInstruction) -> bool:
    """Whether all its users round it."""
    users = value.users
    return not value.is_root and all(
        u.opcode in ABRUPT or u.opcode in ("convert", "compare", "bitcast-convert") for u in users
    )


def _round(value: HloInstruction) -> None:
    computation = value.parent
    wide = computation.add(HloInstruction("convert", value.shape.with_dtype(WIDE_TYPE), [value]))
    rounded = computation.add(HloInstruction("convert", value.shape, [wide]))
    for conversion in (wide, rounded):
        conversion.metadata = value.metadata
    for user in list(value.users):
        if user is not wide:
            value.replace_use(user, rounded)
    if value.is_root:
        computation.set_root(rounded)
