"""Which values are split where they lie, and needed whole where they are used.

A body may read an argument through one cast alone, as a master weight in f32 that is used as bf16: then the
value after the cast is the one to gather.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from mpmd import ir
from mpmd.sharding.partial import tensor
from mpmd.sharding.shardings import Split, axes_by_dim, global_bytes

_MOVES = frozenset(
    f"stablehlo.{name}" for name in ("broadcast_in_dim", "dynamic_slice", "reshape", "slice", "transpose")
) | {"sdy.sharding_constraint"}


@dataclasses.dataclass
class Cast:
    """The conversions of an argument, all to one type, and what comes before them.

    Attributes:
        kind: a result of one of them, whose element type is the others', too.
        moved: values that have the argument's elements, itself included.
        converts: the conversions.
    """

    kind: ir.Type
    moved: Sequence[ir.Value]
    converts: Sequence[ir.Op]

    def move_out(self) -> None:
        """Makes the body take the cast: what comes before the conversions moves elements of any type."""
        for value in self.moved:
            ir.set_type(value, tensor(value.type.shape, self.kind))
        for op in self.converts:
            ir.replace_uses(op.results[0], op.operands[0])
            ir.erase(op)


def cast_of(arg: ir.Value) -> Cast | None:
    """The cast to a smaller type that is all a body reads of an argument; None if there is none."""
    moved, converts = [arg], list[ir.Op]()
    for value in moved:  # grows
        for op, position in ir.uses(value):
            if op.operation.name == "stablehlo.convert":
                converts.append(op)
                continue
            behind = _moved(op, position, value)
            if behind is None:
                return None
            moved += [v for v in behind if v not in moved]
    kinds = [op.results[0].type for op in converts]
    if len({kind.element_type for kind in kinds}) != 1:
        return None
    smaller = global_bytes(tensor(arg.type.shape, kinds[0])) < global_bytes(arg.type)
    return Cast(kinds[0], moved, converts) if smaller else None


def _moved(op: ir.Op, position: int, value: ir.Value) -> list[ir.Value] | None:
    """The values that have elements of an operand of an op; None if it makes something else of them."""
    name = op.operation.name
    if name == "stablehlo.optimization_barrier":
        return [op.results[position]]
    if name in _MOVES:
        return [op.results[0]] if position == 0 else None
    if name == "stablehlo.while":
        blocks = [region.blocks[0] for region in op.operation.regions]
        inside = [block.arguments[position] for block in blocks]
        kept = list(blocks[1].operations)[-1].operands[position] == inside[1]
        return [op.results[position], *inside] if kept else None
    if name == "stablehlo.return":  # of a loop, which passes it on
        carried = list(op.operation.block.arguments)
        return [] if position < len(carried) and carried[position] == value else None
    return None


def axes_needed_whole(
    value: ir.Value, split: Split, axes: frozenset[str], splits: Mapping[ir.Value, Split]
) -> frozenset[str]:
    """The axes, among some, that split an argument of a body and along which all its uses need it whole.

    An axis can split one dim of an operation's data.  Where it splits rows of activations and a dim of a
    weight that has nothing to do with rows, one of the two must be whole: FSDP means the weight.

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
        if axis in axes and _UsesAlong(splits, axis).uses_need(value, dim) is True
    )


def uses_along(
    value: ir.Value, split: Split, axis: str, splits: Mapping[ir.Value, Split]
) -> list[tuple[ir.Op, bool | None]]:
    """What each use of a value that an axis splits needs: all of it (True), its part (False), or either."""
    (dim,) = (d for d, of_dim in enumerate(split) if axis in of_dim)
    along = _UsesAlong(splits, axis)
    return [(op, along.use_needs(op, position, dim)) for op, position in ir.uses(value)]


class _UsesAlong:
    """The uses of a value that an axis may split along one dim.

    Each needs it whole (True), uses it as it is split (False), or is content with both (None).
    """

    def __init__(self, splits: Mapping[ir.Value, Split], axis: str) -> None:
        self.splits = splits
        self.axis = axis

    def uses_need(self, value: ir.Value, dim: int) -> bool | None:
        """True if a use of a value needs it whole, and no other uses it as it is split."""
        return _all_of(self.use_needs(op, position, dim) for op, position in ir.uses(value))

    def use_needs(self, op: ir.Op, position: int, dim: int) -> bool | None:
        """As `uses_need`, for one use: by the dims that the axis splits of operands and results."""
        name, operands = op.operation.name, list(op.operands)
        if name == "stablehlo.while":
            return self.loop_needs(op, position, dim)
        if name in _KEEPS:
            return None
        if name == "stablehlo.optimization_barrier":  # of rematerialised work
            return self.uses_need(op.results[position], dim)
        if name == "sdy.sharding_constraint":
            return self.makes_whole(op, dim) or self.uses_need(op.results[0], dim)
        if name in ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.gather"):
            if position > 1 or not (self.is_split(operands[1 - position]) or self.is_split(op.results[0])):
                return False
            return name != "stablehlo.dot_general" or not self.is_matched(op, position, dim)
        kept = dim_after(op, position, dim) if len(op.results) == 1 else None
        if kept is None:
            return False
        of_result = self.dims(op.results[0])
        if any(self.axis in of_dim for of_dim in of_result):
            return self.axis not in of_result[kept]
        return self.uses_need(op.results[0], kept) if name in _CARRIES else False

    def dims(self, value: ir.Value) -> Split:
        return self.splits.get(value) or ((),) * len(value.type.shape)

    def is_split(self, value: ir.Value) -> bool:
        return any(self.axis in dim for dim in self.dims(value))

    def makes_whole(self, constraint: ir.Op, dim: int) -> bool:
        sharding = constraint.sharding
        of_dim = ir.sdy.DimensionShardingAttr(ir.sdy.TensorShardingAttr(sharding).dimension_shardings[dim])
        names = [axis.name for axis in axes_by_dim(sharding)[dim]]
        return bool(of_dim.is_closed) and self.axis not in names

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

    def loop_needs(self, loop: ir.Op, position: int, dim: int) -> bool | None:
        """The decision of a loop's body on a value that it does not change."""
        body = loop.operation.regions[1].blocks[0]
        last = list(body.operations)[-1]
        if last.operands[position] != body.arguments[position]:
            return False
        inside = [region.blocks[0].arguments[position] for region in loop.operation.regions]
        return _all_of(self.uses_need(value, dim) for value in [*inside, loop.results[position]])


def _all_of(answers: Iterable[bool | None]) -> bool | None:
    distinct = set(answers)
    return False if False in distinct else True if True in distinct else None


# They keep a value for later, such as a weight among the residuals of a loop.
_KEEPS = frozenset({"mpmd.return", "stablehlo.return", "stablehlo.dynamic_update_slice"})

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
    """The dim of an op's result along which dim `dim` of an operand lies; None if there is none."""
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
