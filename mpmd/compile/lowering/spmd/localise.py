"""From a program with whole shapes to one device's; operations keep their global form in `spread`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd.compile.hlo.shape import Shape
from mpmd.compile.lowering.spmd.moves import even, local
from mpmd.compile.lowering.stablehlo_program import (
    Block,
    Function,
    Operation,
    Sharding,
    Spread,
    StablehloProgram,
    ValueId,
)
from mpmd.errors import CompileError

_RESHARD = "sdy.reshard"


def localise(program: StablehloProgram, devices: int, results: Sequence[Sharding]) -> StablehloProgram:
    """The program of one device.

    Args:
        program: with a sharding for every sharded value, and all communication explicit.
        devices: how many run it.
        results: shardings of the results of `main`.

    Raises:
        CompileError: shardings do not fit each other.
    """
    work = _Localising(program, devices)
    functions = {name: work.function(f) for name, f in program.functions.items()}
    work.promised.append(("main", program.functions["main"].body.returned, results))
    for where, values, shardings in work.promised:
        work.agree(where, values, shardings)
    return StablehloProgram(program.name, functions, 1, devices)


class _Localising:
    """The state of the conversion: how each value is sharded, by its number."""

    def __init__(self, program: StablehloProgram, devices: int) -> None:
        self.program = program
        self.devices = devices
        self.sharding: dict[ValueId, Sharding] = {}
        self.shapes: dict[ValueId, Shape] = {}
        self.same: dict[ValueId, ValueId] = {}
        self.promised: list[tuple[str, tuple[ValueId, ...], Sequence[Sharding]]] = []
        self.fresh = 1 + max(_numbers(f.body) for f in program.functions.values())

    def function(self, function: Function) -> Function:
        body = function.body
        given = body.shardings or (None,) * len(body.shapes)
        shardings = [
            _whole(s) if sharding is None else even(s, sharding)
            for s, sharding in zip(body.shapes, given, strict=True)
        ]
        return dataclasses.replace(function, body=self.block(body, shardings))

    def block(self, block: Block, shardings: Sequence[Sharding]) -> Block:
        """A computation whose arguments are sharded in the given way."""
        for value, shape, sharding in zip(block.arguments, block.shapes, shardings, strict=True):
            self.sharding[value], self.shapes[value] = sharding, shape
        localised = Block(block.arguments, tuple(local(s, c) for s, c in zip(block.shapes, shardings)))
        for operation in block.operations:
            localised.operations += self.operation(operation)
        localised.returned = tuple(self.same.get(v, v) for v in block.returned)
        return localised

    def operation(self, operation: Operation) -> list[Operation]:
        operands = tuple(self.same.get(v, v) for v in operation.operands)
        operation = dataclasses.replace(operation, operands=operands)
        if operation.name == "sdy.manual_computation":
            return self.manual(operation)
        if operation.name == "sdy.named_computation":
            raise CompileError("a named computation is left in the fragment")
        given = operation.shardings or tuple(_whole(s) for s in operation.shapes)
        shardings = tuple(even(s, sharding) for s, sharding in zip(operation.shapes, given, strict=True))
        for value, shape, sharding in zip(operation.results, operation.shapes, shardings, strict=True):
            self.sharding[value], self.shapes[value] = sharding, shape
        return [self.spread(operation, shardings)]

    def spread(self, operation: Operation, shardings: Sequence[Sharding]) -> Operation:
        """An operation without nested operations."""
        name, regions = operation.name, []
        for number, region in enumerate(operation.regions):
            if name == "stablehlo.while":
                given = shardings
            else:
                given = [_whole(s) for s in region.shapes]
            regions.append(self.block(region, given))
            if name in ("stablehlo.case", "stablehlo.if") or (name == "stablehlo.while" and number == 1):
                self.agree(name, region.returned, shardings)
        if name == "stablehlo.while":
            self.agree(name, operation.operands, shardings)
        if name == "func.call":
            self.call(operation, shardings)
        return dataclasses.replace(
            operation,
            shapes=tuple(local(s, c) for s, c in zip(operation.shapes, shardings)),
            regions=tuple(regions),
            spread=Spread(
                operation,
                tuple(self.sharding[v] for v in operation.operands),
                tuple(shardings),
                tuple(self.shapes[v] for v in operation.operands),
                self.devices,
            ),
        )

    def call(self, operation: Operation, shardings: Sequence[Sharding]) -> None:
        """Check that the shardings of a function match its call."""
        callee = self.program.functions[str(operation.attributes["callee"])]
        taken = callee.body.shardings or tuple(map(_whole, callee.body.shapes))
        shapes = callee.body.shapes
        wanted = [_whole(s) if t is None else even(s, t) for s, t in zip(shapes, taken, strict=True)]
        self.agree(f"@{callee.name}", operation.operands, wanted)
        self.promised.append((f"@{callee.name}", callee.body.returned, shardings))

    def agree(self, where: str, values: Sequence[ValueId], shardings: Sequence[Sharding]) -> None:
        """Check that values are sharded in the given way.

        Raises:
            CompileError: one is not.
        """
        for value, sharding in zip(values, shardings, strict=True):
            if self.sharding[self.same.get(value, value)] != sharding:
                raise CompileError(f"Shardy left a value of {where} sharded in another way than it is used")

    def manual(self, operation: Operation) -> list[Operation]:
        """The operations of a `shard_map`, whose body is already local along its manual axes."""
        (block,) = operation.regions
        axes = operation.attributes["axes"]
        operations: list[Operation] = []
        free = []
        for k, value in enumerate(operation.operands):
            wanted = operation.attributes["in_shardings"][k]
            if self.sharding[value] != wanted:
                value = self.resharded(value, wanted, operations)
            self.same[block.arguments[k]] = value
            free.append(_without(wanted, axes))
        # inside, a value is sharded along the other axes only
        outside = dict(self.sharding), dict(self.shapes)
        for argument, shape, sharding in zip(block.arguments, block.shapes, free, strict=True):
            source = self.same[argument]
            self.sharding[source], self.shapes[source] = sharding, shape
        for inner in block.operations:
            operations += self.operation(inner)
        self.sharding, self.shapes = outside
        for result, value, shape, sharding in zip(
            operation.results, block.returned, operation.shapes, operation.shardings, strict=True
        ):
            value = self.same.get(value, value)
            if value in self.sharding:  # it has another sharding outside: an argument, or another result
                value = self.copied(value, shape, sharding, operations)
            self.same[result] = value
            self.sharding[value], self.shapes[value] = sharding, shape
        return operations

    def copied(
        self, value: ValueId, shape: Shape, sharding: Sharding, operations: list[Operation]
    ) -> ValueId:
        """Each device's same part under a new value, which is divided in another way."""
        number, self.fresh = self.fresh, self.fresh + 1
        whole = Operation("stablehlo.convert", (value,), (number,), (shape,), {}, (), "", (sharding,))
        spread = Spread(whole, (sharding,), (sharding,), (shape,), self.devices)
        operations.append(dataclasses.replace(whole, shapes=(local(shape, sharding),), spread=spread))
        return number

    def resharded(self, value: ValueId, sharding: Sharding, operations: list[Operation]) -> ValueId:
        number, self.fresh = self.fresh, self.fresh + 1
        shape = self.shapes[value]
        self.sharding[number], self.shapes[number] = sharding, shape
        whole = Operation(_RESHARD, (value,), (number,), (shape,), {}, (), "", (sharding,))
        operations.append(self.spread(whole, (sharding,)))
        return number


def _whole(shape: Shape) -> Sharding:
    return () if shape.is_tuple else ((),) * shape.rank


def _without(sharding: Sharding, axes: Sequence[object]) -> Sharding:
    return tuple(tuple(a for a in dim if a not in axes) for dim in sharding)


def _numbers(block: Block) -> int:
    most = max(block.arguments, default=0)
    for operation in block.operations:
        most = max(most, *operation.results, *map(_numbers, operation.regions), 0)
    return most
