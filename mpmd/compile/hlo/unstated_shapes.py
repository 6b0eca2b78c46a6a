"""Shapes of instructions that state none, as in XLA's parser: `sum = add(a, b)`.

Only operations whose operands determine the result may omit it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.hlo.shape_inference import infer_shape


def unstated_shape(instruction: HloInstruction, called: Sequence[HloComputation]) -> Shape:
    """The shape with layouts of an instruction without a stated one.

    Layouts are those of an operand or a called computation of that shape, a transpose moves nothing, and all
    other results are row-major.

    Args:
        instruction: with operands and attributes; its own shape is ignored.
        called: the computations that it calls.

    Raises:
        HloError: operands or attributes do not fit, or do not determine the shape.
    """
    operands = instruction.operands
    shape = infer_shape(instruction.opcode, [o.shape for o in operands], instruction.attributes, called)
    if instruction.opcode == "transpose":
        return _transposed(operands[0].shape, shape, instruction.dimensions)
    for known in (*_known(instruction), *(c.root.shape for c in called)):
        if known.logical is shape.logical and known.has_layouts:
            return known
    return shape.with_default_layout()


def _known(instruction: HloInstruction) -> list[Shape]:
    """Shapes of operands, of their elements, and of all of them as a tuple."""
    shapes = [o.shape for o in instruction.operands]
    if instruction.opcode == "get-tuple-element":
        return [shapes[0].elements[instruction.tuple_index]]
    if instruction.opcode == "tuple":
        return [tuple_of(shapes)]
    return shapes


def _transposed(source: Shape, shape: Shape, dimensions: Sequence[int]) -> Shape:
    return shape.with_layout([dimensions.index(d) for d in source.minor_to_major])
