"""Arguments of which a body reads one cast alone: masters in f32 that are used as bf16."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd import ir
from mpmd.sharding.partial import tensor
from mpmd.sharding.shards import global_bytes

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
            found = _moved(op, position, value)
            if found is None:
                return None
            moved += [v for v in found if v not in moved]
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
