"""A StableHLO program as plain records: the input of the lowering rules, free of MLIR's bindings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mpmd.compile.hlo.shape import Shape

ValueId = int
"""A value: the result of an operation or the argument of a block, numbered across the program."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a mesh, or a sub-axis: device `d` has coordinate `d // stride % size` on it."""

    stride: int
    size: int


Sharding = tuple[tuple[Axis, ...], ...]
"""For each dim the axes that shard it, the outermost first."""


@dataclass(slots=True)
class Spread:
    """An operation on the whole mesh, where its records describe one device.

    Attributes:
        whole: the operation with whole shapes.
        operands: how its operands are sharded.
        results: how its results are sharded.
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
        source: its location, e.g. `jit(step)/mul`; "" if unknown.
        shardings: shardings of the results, where the program gives them.
        spread: the operation on the whole mesh, where the records describe one device.
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

    `shardings` belong to the arguments of a function, where the program gives them.
    """

    arguments: tuple[ValueId, ...]
    shapes: tuple[Shape, ...]
    operations: list[Operation] = field(default_factory=list)
    returned: tuple[ValueId, ...] = ()
    shardings: tuple[Sharding | None, ...] = ()

    def walk(self) -> Iterator[Operation]:
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
    """A module: functions by name; `main` is the entry."""

    name: str
    functions: dict[str, Function]
    replicas: int = 1
    partitions: int = 1
