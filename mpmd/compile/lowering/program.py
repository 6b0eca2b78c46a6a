"""A StableHLO program as plain records: what the rules of lowering look at, free of MLIR's bindings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mpmd.compile.hlo.shape import Shape

ValueId = int
"""A value: the result of an operation or the argument of a block, numbered across the program."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a mesh, or a part of one: device `d` stands at `d // stride % size` on it."""

    stride: int
    size: int


Sharding = tuple[tuple[Axis, ...], ...]
"""For each dim the axes that cut it, the outermost cut first."""


@dataclass(slots=True)
class Spread:
    """What an operation is for the mesh as a whole, while its records speak of one device.

    Attributes:
        whole: the operation with whole shapes.
        operands: how its operands are cut.
        results: how its results are cut.
        shapes: whole shapes of its operands.
        devices: how many devices the mesh has.
    """

    whole: Operation
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    shapes: tuple[Shape, ...]
    devices: int


@dataclass(slots=True)
class Operation:
    """One operation.

    Attributes:
        name: with dialect, e.g. `stablehlo.add`.
        operands: values it reads.
        results: values it defines.
        shapes: shapes of the results.
        attributes: as Python values: numbers, strings, tuples, arrays, dimension records.
        regions: computations inside it.
        source: where it comes from, e.g. `jit(step)/mul`; "" if unknown.
        shardings: how its results are cut, where the program says so.
        spread: what it is on the whole mesh, where the records speak of one device.
    """

    name: str
    operands: tuple[ValueId, ...]
    results: tuple[ValueId, ...]
    shapes: tuple[Shape, ...]
    attributes: dict[str, Any]
    regions: tuple[Block, ...]
    source: str
    shardings: tuple[Sharding, ...] = ()
    spread: Spread | None = None


@dataclass(slots=True)
class Block:
    """A computation: arguments, operations, returned values.

    `shardings` says how the arguments of a function are cut, where the program says so.
    """

    arguments: tuple[ValueId, ...]
    shapes: tuple[Shape, ...]
    operations: list[Operation] = field(default_factory=list)
    returned: tuple[ValueId, ...] = ()
    shardings: tuple[Sharding | None, ...] = ()

    def walk(self) -> Iterator[Operation]:
        """All operations, those of inner blocks included."""
        for operation in self.operations:
            yield operation
            for region in operation.regions:
                yield from region.walk()

    def captured(self) -> tuple[ValueId, ...]:
        """Values it reads that are defined outside, in order of first use."""
        defined: set[ValueId] = set()
        used: dict[ValueId, None] = {}
        self._scan(defined, used)
        return tuple(v for v in used if v not in defined)

    def _scan(self, defined: set[ValueId], used: dict[ValueId, None]) -> None:
        defined.update(self.arguments)
        for operation in self.operations:
            used.update(dict.fromkeys(operation.operands))
            for region in operation.regions:
                region._scan(defined, used)
            defined.update(operation.results)
        used.update(dict.fromkeys(self.returned))


@dataclass(slots=True)
class Function:
    """A function of the program.

    Attributes:
        name: without `@`.
        body: its computation.
        argument_attributes: per argument, its attributes (aliasing, donation ...).
    """

    name: str
    body: Block
    argument_attributes: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class StablehloProgram:
    """A module: functions by name, of which `main` is the entry."""

    name: str
    functions: dict[str, Function]
    replicas: int = 1
    partitions: int = 1
