"""Which values are split where they lie, and needed whole where they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpmd import ir
from mpmd.sharding.inside import Split


def axes_needed_whole(
    value: ir.Value, split: Split, axes: frozenset[str], splits: Mapping[ir.Value, Split]
) -> frozenset[str]:
    """Those of some axes that split an argument of a body, and along which all its uses need it whole.

    An axis can split one dim of an operation's data.  Where it splits rows of activations and a dim of a weight
    that has nothing to do with rows, one of the two must be whole: FSDP means the weight.

    Args:
        value: the argument.
        split: how it is split where it lies.
        axes: that split rows.
        splits: how values are split in the body, if no argument is split along `axes` but rows.
    """
    return frozenset(
        axis
        for dim, of_dim in enumerate(split)
        for axis in of_dim
        if axis in axes and not ir.is_unused(value) and _Search(splits, axis).is_needed_whole(value, dim)
    )


class _Search:
    """The uses of a value one dim of which an axis may split."""

    def __init__(self, splits: Mapping[ir.Value, Split], axis: str) -> None:
        self.splits = splits
        self.axis = axis

    def is_needed_whole(self, value: ir.Value, dim: int) -> bool:
        """Whether all uses of a value with such a dim need it whole."""
        return all(self.use_needs_whole(op, position, dim) for op, position in ir.uses(value))

    def use_needs_whole(self, op: ir.Op, position: int, dim: int) -> bool:
        """Whether the axis splits other dims of what an op takes or gives."""
        name, operands = op.operation.name, list(op.operands)
        if name == "stablehlo.while":
            return self.loop_needs_whole(op, position, dim)
        if name == "stablehlo.return":
            return is_passed_on(op, position)
        if name in ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.gather"):
            if position > 1 or not self.is_split(operands[1 - position]) and not self.is_split(op.results[0]):
                return False
            return name != "stablehlo.dot_general" or not self.is_matched(op, position, dim)
        kept = dim_after(op, position, dim) if len(op.results) == 1 else None
        if kept is None:
            return False
        of_result = self.dims(op.results[0])
        if any(self.axis in of_dim for of_dim in of_result):
            return self.axis not in of_result[kept]
        return name in _CARRIES and self.is_needed_whole(op.results[0], kept)

    def dims(self, value: ir.Value) -> Split:
        return self.splits.get(value) or ((),) * len(value.type.shape)

    def is_split(self, value: ir.Value) -> bool:
        return any(self.axis in dim for dim in self.dims(value))

    def is_matched(self, op: ir.Op, position: int, dim: int) -> bool:
        """Whether the axis splits the other operand, or the result, of a product in the same dim."""
        dims = ir.stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        sides = (
            [*dims.lhs_batching_dimensions, *dims.lhs_contracting_dimensions],
            [*dims.rhs_batching_dimensions, *dims.rhs_contracting_dimensions],
        )
        own, other = sides[position], sides[1 - position]
        if dim in own:
            return self.axis in self.dims(op.operands[1 - position])[other[own.index(dim)]]
        free = [d for d in range(len(op.operands[position].type.shape)) if d not in own]
        batch = len(dims.lhs_batching_dimensions)
        before = batch if position == 0 else len(op.results[0].type.shape) - len(free)
        return self.axis in self.dims(op.results[0])[before + free.index(dim)]

    def loop_needs_whole(self, loop: ir.Op, position: int, dim: int) -> bool:
        """Whether the body of a loop needs a value whole that it does not change."""
        body = loop.operation.regions[1].blocks[0]
        last = list(body.operations)[-1]
        invariant = last.operands[position] == body.arguments[position]
        return invariant and ir.is_unused(loop.results[position]) and all(
            self.is_needed_whole(region.blocks[0].arguments[position], dim) for region in loop.operation.regions
        )


def is_passed_on(terminator: ir.Op, position: int) -> bool:
    """Whether the body of a loop returns one of its arguments as it is."""
    value = terminator.operands[position]
    of_loop = terminator.operation.parent.name == "stablehlo.while"
    return of_loop and ir.producer(value) is None and ir.arg_index(value) == position


_CARRIES = frozenset(
    {
        "stablehlo.broadcast_in_dim",
        "stablehlo.convert",
        "stablehlo.dynamic_slice",
        "stablehlo.reshape",
        "stablehlo.slice",
        "stablehlo.transpose",
    }
)


def dim_after(op: ir.Op, position: int, dim: int) -> int | None:
    """The dim of an op's result along which lies what was along `dim` of an operand; None if there is none."""
    name, shape = op.operation.name, op.operands[position].type.shape
    after = op.results[0].type.shape
    match name:
        case "stablehlo.transpose":
            return _list(op, "permutation").index(dim)
        case "stablehlo.broadcast_in_dim":
            return _list(op, "broadcast_dimensions")[dim]
        case "stablehlo.reshape":
            return _reshaped(shape, after, dim)
        case "stablehlo.slice" | "stablehlo.dynamic_slice":
            return dim if position == 0 and shape[dim] == after[dim] else None
    return dim if list(shape) == list(after) and name in _ELEMENTWISE else None


_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in ("add", "convert", "divide", "maximum", "minimum", "multiply", "negate", "select", "subtract")
)


def _reshaped(before: list[int], after: list[int], dim: int) -> int | None:
    """Where the outermost part of a dim is after a reshape."""
    outside = math.prod(before[:dim])
    for d in range(len(after)):
        if math.prod(after[:d]) == outside and after[d] > 1:
            return d if before[dim] % after[d] == 0 or after[d] % before[dim] == 0 else None
    return None


def _list(op: ir.Op, name: str) -> list[int]:
    return [int(n) for n in ir.DenseI64ArrayAttr(op.attributes[name])]
