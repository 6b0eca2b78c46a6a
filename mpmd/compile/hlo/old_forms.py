"""Older forms of HLO text, read as the present ones.

dynamic-slice(x, starts)          starts in one vector -> one scalar per dim
map(x), to_apply=f                -> dimensions={0,1,...}
broadcast(scalar)                 -> dimensions={}

Shapes of instructions that state none, as in XLA's parser: `sum = add(a, b)`.

Only operations whose operands determine the result may omit it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from mpmd.compile.hlo.attributes import Attribute, SliceDims
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.hlo.shape_inference import infer_shape

STARTS = {"dynamic-slice": 1, "dynamic-update-slice": 2}
"""Opcode → its first operand that is a start."""


def complete(instruction: HloInstruction) -> None:
    """Set the optional attributes; those in the text replace them."""
    source = instruction.operands[0].shape if instruction.operands else None
    if instruction.opcode == "map" and source is not None:
        instruction.attributes["dimensions"] = tuple(range(source.rank))
    elif instruction.opcode == "broadcast" and source is not None and source.is_scalar:
        instruction.attributes["dimensions"] = ()


def vector_of_starts(instruction: HloInstruction) -> bool:
    """Whether a dynamic slice has its starts in one vector of the right length."""
    first = STARTS[instruction.opcode]
    if len(instruction.operands) != first + 1:
        return False
    source, starts = instruction.operands[0].shape, instruction.operands[first].shape
    return starts.is_array and source.is_array and starts.dims == (source.rank,)


def scalar_starts(instruction: HloInstruction, names: Container[str]) -> list[HloInstruction]:
    """Let a slice take each start by itself.

    Args:
        instruction: a slice with a vector of starts; changed in place.
        names: names that are taken.

    Returns:
        The instructions that split the vector, operands first; they are in no computation yet.
    """
    first = STARTS[instruction.opcode]
    vector = instruction.operands[first]
    added, scalars = [], []
    for d in range(vector.shape.dims[0]):
        part = Shape(vector.shape.dtype, (1,)).with_default_layout()
        bounds: dict[str, Attribute] = {"slice": SliceDims((d,), (d + 1,), (1,))}
        taken = HloInstruction("slice", part, [vector], bounds, name=_free(instruction, f"slice_{d}", names))
        name = _free(instruction, f"start_{d}", names)
        scalar = HloInstruction("reshape", vector.shape.scalar(), [taken], name=name)
        added += [taken, scalar]
        scalars.append(scalar)
    instruction.replace_operands([*instruction.operands[:first], *scalars])
    return added


def _free(instruction: HloInstruction, ending: str, names: Container[str]) -> str:
    name = f"{instruction.given_name}.{ending}"
    while name in names:
        name += "_"
    return name


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
