"""Fixed layouts."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.layout import Layout
from mpmd.compile.hlo.shape import Shape, ShapeIndex

_AS_RESULT = frozenset(
    ["concatenate", "pad", "slice", "reverse", "dynamic-slice", "dynamic-update-slice", "map"]
)
_ANY = frozenset(["transpose", "reshape", "broadcast", "reduce", "copy", "dot"])
_PLAIN = frozenset(["bitcast", "bitcast-convert"])  # dims may split or join
_LEAF = frozenset(["iota", "constant"])


class Requirements:
    """The layouts that a computation's operations need.

    Args:
        computation: the computation.
        interface: shapes with layouts of the program's parameters and result.
        free_transposes: transposes may have the layout in which they move nothing.
        free_products: results of dots may have any layout.
    """

    def __init__(
        self,
        computation: HloComputation,
        interface: tuple[tuple[Shape, ...], Shape],
        free_transposes: bool,
        free_products: bool,
    ) -> None:
        self.computation = computation
        self.interface = interface
        self.free_transposes = free_transposes
        self.free_products = free_products

    def of_result(self, instruction: HloInstruction) -> Layout | None:
        """The layout that an array-valued instruction must have; None if it may be chosen."""
        opcode = instruction.opcode
        if opcode == "parameter":
            return self.of_parameter(instruction).layout
        if opcode == "get-tuple-element":
            return self._of_element(instruction)
        if opcode in ("opt-barrier", "domain", "add-dependency"):
            return None
        if opcode in _PLAIN:
            return _row_major(instruction)
        if opcode == "copy":
            return instruction.shape.filled().layout
        if opcode == "dot":
            return None if self.free_products else _row_major(instruction)
        if opcode == "transpose":
            return None if self.free_transposes else _row_major(instruction)
        if instruction.is_elementwise or opcode in _AS_RESULT or opcode in _ANY or opcode in _LEAF:
            return None
        return _row_major(instruction)

    def of_parameter(self, instruction: HloInstruction) -> Shape:
        """A parameter's shape: the caller's for the entry, row-major elsewhere."""
        if self.computation.is_entry:
            return self.interface[0][instruction.parameter_number]
        return instruction.shape.with_default_layout()

    def of_root(self, index: ShapeIndex) -> Shape:
        """The shape at a position of the result."""
        if self.computation.is_entry:
            return self.interface[1].subshape(index)
        return self.computation.root.shape.with_default_layout().subshape(index)

    def of_operand(self, instruction: HloInstruction, number: int) -> Layout | None:
        """The layout that an operand must have here, once results have theirs; None if any will do."""
        operand = instruction.operands[number]
        if not operand.shape.is_array:
            return None
        opcode = instruction.opcode
        if opcode == "tuple":
            return self._of_tuple_operand(instruction, number)
        if operand.shape.is_scalar or opcode in _ANY:
            return None
        if opcode in _PLAIN:
            return _row_major(operand)
        if opcode in ("opt-barrier", "domain", "add-dependency"):
            return instruction.shape.layout
        if instruction.is_elementwise or opcode in _AS_RESULT:
            return instruction.shape.layout
        return _row_major(operand)

    def _of_tuple_operand(self, instruction: HloInstruction, number: int) -> Layout | None:
        """As the result of the program, or row-major: tuples go to loops, calls and library calls."""
        if instruction.is_root:
            return self.of_root((number,)).layout
        operand = instruction.operands[number]
        return _row_major(operand)

    def _of_element(self, instruction: HloInstruction) -> Layout | None:
        index: ShapeIndex = (instruction.tuple_index,)
        source = instruction.operands[0]
        while source.opcode == "get-tuple-element":
            index = (source.tuple_index, *index)
            source = source.operands[0]
        if source.opcode == "parameter":
            return self.of_parameter(source).subshape(index).layout
        if source.opcode == "tuple" and source.is_root:
            return self.of_root(index).layout
        return _row_major(instruction)


def _row_major(instruction: HloInstruction) -> Layout:
    return Layout.row_major(instruction.shape.rank)
