"""From a program with whole shapes to that of one device; operations keep what they are on the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd.compile.hlo.shape import Shape
from mpmd.compile.lowering.program import (
    Block,
    Function,
    Operation,
    Sharding,
    Spread,
    StablehloProgram,
    ValueId,
)
from mpmd.compile.lowering.spmd.devices import even, local
from mpmd.errors import CompileError

_RESHARD = "sdy.reshard"


def localise(program: StablehloProgram, devices: int, results: Sequence[Sharding]) -> StablehloProgram:
    """The program of one device.

    Args:
        program: with a sharding for every value that is cut, and all communication explicit.
        devices: how many run it.
        results: how the results of `main` are to be cut.

    Raises:
        CompileError: shardings do not fit each other.
    """
    work = _Localising(program, devices)
    functions = {name: work.function(f) for name, f in program.functions.items()}
    work.promised.append(("main", program.functions["main"].body.returned, results))
    for where, values, cuts in work.promised:
        work.agree(where, values, cuts)
    return StablehloProgram(program.name, functions, 1, devices)


class _Localising:
    """The work on one program: how each value is cut, by its number."""

    def __init__(self, program: StablehloProgram, devices: int) -> None:
        self.program = program
        self.devices = devices
        self.cut: dict[ValueId, Sharding] = {}
        self.shapes: dict[ValueId, Shape] = {}
        self.same: dict[ValueId, ValueId] = {}
        self.promised: list[tuple[str, tuple[ValueId, ...], Sequence[Sharding]]] = []
        self.fresh = 1 + max(_numbers(f.body) for f in program.functions.values())

    def function(self, function: Function) -> Function:
        body = function.body
        given = body.shardings or (None,) * len(body.shapes)
        cuts = [_whole(s) if cut is None else even(s, cut) for s, cut in zip(body.shapes, given, strict=True)]
        return dataclasses.replace(function, body=self.block(body, cuts))

    def block(self, block: Block, cuts: Sequence[Sharding]) -> Block:
        """A computation whose arguments are cut in the given way."""
        for value, shape, cut in zip(block.arguments, block.shapes, cuts, strict=True):
            self.cut[value], self.shapes[value] = cut, shape
        made = Block(block.arguments, tuple(local(s, c) for s, c in zip(block.shapes, cuts)))
        for operation in block.operations:
            made.operations += self.operation(operation)
        made.returned = tuple(self.same.get(v, v) for v in block.returned)
        return made

    def operation(self, operation: Operation) -> list[Operation]:
        operands = tuple(self.same.get(v, v) for v in operation.operands)
        operation = dataclasses.replace(operation, operands=operands)
        if operation.name == "sdy.manual_computation":
            return self.manual(operation)
        if operation.name == "sdy.named_computation":
            raise CompileError("a named computation is left in the fragment")
        given = operation.shardings or tuple(_whole(s) for s in operation.shapes)
        cuts = tuple(even(s, cut) for s, cut in zip(operation.shapes, given, strict=True))
        for value, shape, cut in zip(operation.results, operation.shapes, cuts, strict=True):
            self.cut[value], self.shapes[value] = cut, shape
        return [self.spread(operation, cuts)]

    def spread(self, operation: Operation, cuts: Sequence[Sharding]) -> Operation:
        """An operation that is no shell of others."""
        name, regions = operation.name, []
        for number, region in enumerate(operation.regions):
            if name == "stablehlo.while":
                given = cuts
            else:
                given = [_whole(s) for s in region.shapes]
            regions.append(self.block(region, given))
            if name in ("stablehlo.case", "stablehlo.if") or (name == "stablehlo.while" and number == 1):
                self.agree(name, region.returned, cuts)
        if name == "stablehlo.while":
            self.agree(name, operation.operands, cuts)
        if name == "func.call":
            self.call(operation, cuts)
        return dataclasses.replace(
            operation,
            shapes=tuple(local(s, c) for s, c in zip(operation.shapes, cuts)),
            regions=tuple(regions),
            spread=Spread(
                operation,
                tuple(self.cut[v] for v in operation.operands),
                tuple(cuts),
                tuple(self.shapes[v] for v in operation.operands),
                self.devices,
            ),
        )

    def call(self, operation: Operation, cuts: Sequence[Sharding]) -> None:
        """Check that a function takes and gives what its call does."""
        callee = self.program.functions[str(operation.attributes["callee"])]
        taken = callee.body.shardings or tuple(map(_whole, callee.body.shapes))
        shapes = callee.body.shapes
        wanted = [_whole(s) if t is None else even(s, t) for s, t in zip(shapes, taken, strict=True)]
        self.agree(f"@{callee.name}", operation.operands, wanted)
        self.promised.append((f"@{callee.name}", callee.body.returned, cuts))

    def agree(self, where: str, values: Sequence[ValueId], cuts: Sequence[Sharding]) -> None:
        """Check that values are cut in the given way.

        Raises:
            CompileError: one is not.
        """
        for value, cut in zip(values, cuts, strict=True):
            if self.cut[self.same.get(value, value)] != cut:
                raise CompileError(f"Shardy left a value of {where} cut in another way than it is used")

    def manual(self, operation: Operation) -> list[Operation]:
        """The operations of a `shard_map`: it speaks of one device already, as far as its axes go."""
        (block,) = operation.regions
        axes = operation.attributes["axes"]
        made: list[Operation] = []
        free = []
        for k, value in enumerate(operation.operands):
            wanted = operation.attributes["in_cuts"][k]
            if self.cut[value] != wanted:
                value = self.resharded(value, wanted, made)
            self.same[block.arguments[k]] = value
            free.append(_without(wanted, axes))
        # inside, a value is cut along the other axes only
        outside = dict(self.cut), dict(self.shapes)
        for argument, shape, cut in zip(block.arguments, block.shapes, free, strict=True):
            source = self.same[argument]
            self.cut[source], self.shapes[source] = cut, shape
        for inner in block.operations:
            made += self.operation(inner)
        for result, value, cut in zip(operation.results, block.returned, operation.shardings, strict=True):
            self.same[result] = self.same.get(value, value)
            outside[0][self.same[result]] = cut
        for result, shape in zip(operation.results, operation.shapes, strict=True):
            outside[1][self.same[result]] = shape
        self.cut, self.shapes = outside
        return made

    def resharded(self, value: ValueId, cut: Sharding, made: list[Operation]) -> ValueId:
        """A value cut in another way."""
        number, self.fresh = self.fresh, self.fresh + 1
        shape = self.shapes[value]
        self.cut[number], self.shapes[number] = cut, shape
        whole = Operation(_RESHARD, (value,), (number,), (shape,), {}, (), "", (cut,))
        made.append(self.spread(whole, (cut,)))
        return number


def _whole(shape: Shape) -> Sharding:
    return () if shape.is_tuple else ((),) * shape.rank


def _without(sharding: Sharding, axes: Sequence[object]) -> Sharding:
    return tuple(tuple(a for a in dim if a not in axes) for dim in sharding)


def _numbers(block: Block) -> int:
    """The largest number of a value."""
    most = max(block.arguments, default=0)
    for operation in block.operations:
        most = max(most, *operation.results, *map(_numbers, operation.regions), 0)
    return most
