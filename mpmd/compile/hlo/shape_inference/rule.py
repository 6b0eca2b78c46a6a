"""The input of a rule of shape inference, and shared checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpmd.compile.hlo.attributes import Attribute, Ints, Window
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError


@dataclass(frozen=True, slots=True)
class Query:
    """A query for the shape of an instruction.

    Attributes:
        opcode: of the instruction.
        operands: shapes of its operands, without layouts.
        attributes: typed attributes.
        called: computations it calls.
        stated: the shape in the program, without layouts; None: not known.
    """

    opcode: str
    operands: tuple[Shape, ...]
    attributes: Mapping[str, Attribute]
    called: Sequence[HloComputation]
    stated: Shape | None

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def claim(self) -> Shape:
        """The stated shape, for opcodes whose operands do not determine it.

        Raises:
            HloError: none was stated.
        """
        if self.stated is None:
            raise HloError(f"the shape of {self.opcode} does not follow from its operands: it must be stated")
        return self.stated

    def array(self, index: int) -> Shape:
        """Operand `index`, which must be an array.

        Raises:
            HloError: it is not.
        """
        shape = self.operands[index]
        if not shape.is_array:
            raise HloError(f"operand {index} of {self.opcode} must be an array, got {shape}")
        return shape


Rule = Callable[[Query], Shape]


def logical(dtype: str, dims: Sequence[int]) -> Shape:
    """An array shape without layout."""
    return Shape(dtype, tuple(dims))


def check(condition: bool, message: str) -> None:
    """Raise `HloError` with the message unless the condition holds."""
    if not condition:
        raise HloError(message)


def check_dims(query: Query, name: str, dims: Ints, rank: int) -> None:
    """Dim numbers must lie in 0..rank-1, each once."""
    wrong = next((d for d in dims if not 0 <= d < rank), None)
    check(wrong is None, f"{name} of {query.opcode} names dim {wrong}, but there are {rank} dims")
    check(len(set(dims)) == len(dims), f"{name} of {query.opcode} names a dim twice: {dims}")


def check_starts(query: Query, first: int) -> None:
    """Operands from `first` on are starts: integer scalars."""
    for index in range(first, len(query.operands)):
        shape = query.array(index)
        check(
            shape.is_scalar and shape.info.is_integral,
            f"start {index} of {query.opcode} must be an integer scalar, got {shape}",
        )


def check_window(query: Query, rank: int, of: object) -> Window:
    """The window, whose sizes, strides and dilations must be positive; one dim for each of `rank`."""
    window: Window = query.attribute("window") or Window()
    check(
        len(window.dims) == rank,
        f"the window of {query.opcode} must have {rank} dims for {of}, got {len(window.dims)}",
    )
    for d, side in enumerate(window.dims):
        named = {
            "size": side.size,
            "stride": side.stride,
            "lhs_dilate": side.lhs_dilation,
            "rhs_dilate": side.rhs_dilation,
        }
        for name, value in named.items():
            check(
                value > 0, f"{name} of the window of {query.opcode} must be positive in dim {d}, got {value}"
            )
    return window


def same(query: Query, a: Shape, b: Shape, what: str) -> None:
    """Two shapes must agree."""
    check(a.logical is b.logical, f"{what} of {query.opcode} must have equal shapes, got {a} and {b}")


def check_reducer(query: Query, computation: HloComputation, elements: Sequence[Shape]) -> None:
    """A reducer takes two scalars per value and returns one; element types may be wider than the values'."""
    count = len(elements)
    parameters = [p.shape for p in computation.parameters]
    check(
        len(parameters) == 2 * count,
        f"the computation of {query.opcode} over {count} values takes {2 * count} scalars; "
        f"{computation.name} takes {len(parameters)}",
    )
    results = (
        computation.root.shape.elements if computation.root.shape.is_tuple else (computation.root.shape,)
    )
    check(
        len(results) == count,
        f"the computation of {query.opcode} over {count} values gives {count} values; {computation.name} "
        f"gives {len(results)}",
    )
    for index, shape in enumerate(parameters):
        check(
            shape.is_scalar,
            f"parameter {index} of {computation.name} must be a scalar for {query.opcode}, got {shape}",
        )
    for index, (element, result) in enumerate(zip(elements, results)):
        accumulator = parameters[index]
        check(
            accumulator.logical is result.logical,
            f"{computation.name} takes accumulator {index} as {accumulator} but gives {result}",
        )
        check(
            element.info.kind == accumulator.info.kind,
            f"{computation.name} takes {accumulator} for values of type {element.dtype}",
        )
