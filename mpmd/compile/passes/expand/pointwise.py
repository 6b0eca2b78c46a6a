"""Computations on scalars, applied to whole arrays operation by operation."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.rewriter import TrackingBuilder


def is_inlinable(computation: HloComputation) -> bool:
    """Whether `applied` supports a computation: elementwise work on scalars, one result or a tuple."""
    return all(_is_simple(i) for i in computation)


def applied(
    build: TrackingBuilder, computation: HloComputation, arguments: Sequence[HloInstruction]
) -> list[HloInstruction]:
    """The results of a computation for every element of its arguments.

    Args:
        build: the builder.
        computation: one that `is_inlinable`.
        arguments: for each parameter an array; all have the same dims.

    Returns:
        An array per element of its result; one if that is not a tuple.
    """
    dims = arguments[0].shape.dims
    values: dict[HloInstruction, HloInstruction] = {}
    for instruction in computation.post_order():
        if instruction.opcode == "tuple":
            continue
        if instruction.opcode == "parameter":
            values[instruction] = arguments[instruction.parameter_number]
        elif instruction.opcode == "constant":
            values[instruction] = build.broadcast(build.constant(instruction.literal), dims)
        elif instruction.opcode == "broadcast":  # of a scalar to a scalar
            values[instruction] = values[instruction.operands[0]]
        else:
            operands = [values[o] for o in instruction.operands]
            values[instruction] = build.like(instruction, operands, array(instruction.shape.dtype, dims))
    root = computation.root
    return [values[o] for o in root.operands] if root.opcode == "tuple" else [values[root]]


def _is_simple(instruction: HloInstruction) -> bool:
    if instruction.opcode == "tuple":
        return instruction.is_root
    if not instruction.shape.is_array or instruction.shape.dims:
        return False
    if instruction.opcode in ("parameter", "constant", "broadcast"):
        return True
    return instruction.is_elementwise and instruction.opcode != "map"
