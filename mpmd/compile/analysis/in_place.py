"""Operations that write their result into an operand's memory."""

from __future__ import annotations

from typing import cast

from mpmd.compile.hlo.attributes import OutputAlias
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
    """The source of a chain of bitcasts."""
    while value.opcode == "bitcast":
        value = value.operands[0]
    return value
