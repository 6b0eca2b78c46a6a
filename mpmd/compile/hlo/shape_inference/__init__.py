"""The shape of each operation's result: one rule per opcode, one file per family.

Rules use shapes without layouts.  Where operands do not determine the result (convert, reshape,
broadcast, custom calls ...) the rule takes the stated shape and checks it as far as possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpmd.compile.hlo.attributes import Attribute
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.hlo.shape_inference import (
    collectives,
    control,
    elementwise,
    movement,
    products,
)
from mpmd.compile.hlo.shape_inference.rule import Query, Rule

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **movement.RULES,
    **products.RULES,
    **control.RULES,
    **collectives.RULES,
}


def infer_shape(
    opcode: str,
    operands: Sequence[Shape],
    attributes: Mapping[str, Attribute],
    called: Sequence[HloComputation] = (),
    stated: Shape | None = None,
) -> Shape:
    """The shape of an operation's value, without layouts.

    Arrays with run-time sizes are taken as stated.

    Raises:
        HloError: operands or attributes do not fit the operation.
    """
    shapes = tuple(s.logical for s in operands)
    if stated is not None and (_is_dynamic(stated) or any(map(_is_dynamic, shapes))):
        return stated.logical
    return RULES[opcode](
        Query(opcode, shapes, attributes, called, stated.logical if stated is not None else None)
    )


def infer_instruction(instruction: HloInstruction) -> Shape:
    """The shape that an instruction should have.

    Raises:
        HloError: operands or attributes do not fit the operation.
    """
    shapes = [o.shape for o in instruction.operands]
    return infer_shape(
        instruction.opcode, shapes, instruction.attributes, instruction.called, instruction.shape
    )


def _is_dynamic(shape: Shape) -> bool:
    return bool(shape.dynamic) or any(_is_dynamic(e) for e in shape.elements)
