"""The assignment of memory: a slice of an allocation for every value of a scheduled program.

Allocations are the program's parameters, its results, its constants and one arena for all else.  A parameter
that is given away and the result that takes its memory are one allocation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpmd.compile.analysis.dataflow import Dataflow, HloValue
from mpmd.compile.buffers.packing import Block, Packing, aligned, pack
from mpmd.compile.buffers.ranges import Occupancy
from mpmd.compile.buffers.sharing import MayShare, Sharing
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex
from mpmd.errors import CompileError


@dataclass(frozen=True)
class Allocation:
    """Memory of its own.

    Attributes:
        number: in the table.
        kind: `parameter`, `result`, `constant` or `arena`.
        size: bytes.
        index: number of the parameter or result; 0 otherwise.
    """

    number: int
    kind: str
    size: int
    index: int = 0

    def __str__(self) -> str:
        name = f"{self.kind} {self.index}" if self.kind in ("parameter", "result") else self.kind
        return f"allocation {self.number}: {name}, {self.size} bytes"


@dataclass(frozen=True)
class Slice:
    """Part of an allocation.

    Attributes:
        allocation: its number.
        offset: bytes before it.
        size: bytes.
    """

    allocation: int
    offset: int
    size: int

    def overlaps(self, other: Slice) -> bool:
        """Whether they have a byte in common."""
        apart = self.offset + self.size <= other.offset or other.offset + other.size <= self.offset
        return self.allocation == other.allocation and not apart and self.size > 0 and other.size > 0

    def __str__(self) -> str:
        return f"{self.allocation}[{self.offset}:{self.offset + self.size}]"


@dataclass(frozen=True)
class BufferAssignment:
    """Where every value lies.

    Attributes:
        allocations: by number: parameters, results, constants, arena.
        slices: per value.
        results: where each result must be at the end, which may be elsewhere than its value.
        constants: the values behind the slices of the constants' allocation.
        occupancy: when values are in use.
        packing: how the arena was packed.
    """

    allocations: tuple[Allocation, ...]
    slices: Mapping[HloValue, Slice]
    results: tuple[Slice, ...]
    constants: tuple[HloValue, ...]
    occupancy: Occupancy
    packing: Packing

    def at(self, instruction: HloInstruction, index: ShapeIndex = ()) -> Slice:
        """Where the value at a position lies."""
        return self.slices[self.occupancy.dataflow.value_at(instruction, index)]

    @property
    def arena_bytes(self) -> int:
        """Size of the arena."""
        return self.allocations[-1].size

    @property
    def constant_bytes(self) -> int:
        """Size of the constants."""
        return self.allocations[-2].size


def assign_buffers(module: HloModule, may_share: MayShare) -> BufferAssignment:
    """Memory for every value of a scheduled program with a flat call graph.

    Args:
        module: parameters and results are arrays; `input_output_alias` says which of them share memory.
        may_share: which operands results may be written over.

    Raises:
        CompileError: a parameter or result is a tuple, or the calls are not flat.
    """
    dataflow = Dataflow(module)
    if not dataflow.graph.is_flat():
        raise CompileError(f"module {module.name} has computations that are called from several places")
    border = _Border(module, dataflow)
    occupancy = Occupancy(dataflow)
    sharing = Sharing(occupancy, border.bound(occupancy), border.homes(), may_share)
    slices: dict[HloValue, Slice] = {}
    blocks, packed = [], []
    constants: list[HloValue] = []
    constant_bytes = 0
    for group in sharing.groups():
        size = max(v.byte_size for v in group)
        place = border.place_of(group)
        if group[0].instruction.opcode == "constant":
            slices[group[0]] = Slice(border.constants, constant_bytes, size)
            constants += group
            constant_bytes += aligned(size)
        elif place is not None:
            slices.update((v, Slice(place, 0, v.byte_size)) for v in group)
        else:
            first, last = min(map(occupancy.first, group)), max(map(occupancy.last, group))
            blocks.append(Block(size, first, last))
            packed.append(group)
    packing = pack(blocks)
    for group, offset in zip(packed, packing.offsets):
        slices.update((v, Slice(border.arena, offset, v.byte_size)) for v in group)
    allocations = border.allocations(constant_bytes, packing.size)
    return BufferAssignment(allocations, slices, border.result_slices(), tuple(constants), occupancy, packing)


class _Border:
    """Parameters, results, and who shares memory with whom among them."""

    def __init__(self, module: HloModule, dataflow: Dataflow) -> None:
        self.module = module
        self.parameters = module.entry.parameters
        root = module.entry.root
        leaves = list(root.shape.leaves())
        shapes = [p.shape for p in self.parameters] + [s for _, s in leaves]
        if not all(s.is_array for s in shapes):
            raise CompileError(f"module {module.name}: parameters and results must be arrays")
        self.results = [dataflow.value_at(root, index) for index, _ in leaves]
        self.result_bytes = [s.byte_size for _, s in leaves]
        self.parameter_values = [dataflow.value_at(p) for p in self.parameters]
        count = len(self.parameters)
        positions = {index: k for k, (index, _) in enumerate(leaves)}
        self.result_place = [count + k for k in range(len(leaves))]
        self.given = set[int]()
        for alias in module.input_output_alias:
            self.result_place[positions[alias.output_index]] = alias.parameter
            self.given.add(alias.parameter)
        self.constants = count + len(leaves)
        self.arena = self.constants + 1

    def bound(self, occupancy: Occupancy) -> dict[HloValue, frozenset[int]]:
        """Values that have an allocation already; a result only if its memory is free when it is written."""
        found: dict[HloValue, frozenset[int]] = {}
        for number, value in enumerate(self.parameter_values):
            # -1: nothing else may be written there
            found[value] = frozenset((number,)) if number in self.given else frozenset((number, -1))
        for value, place in zip(self.results, self.result_place):
            if value in found or value.instruction.opcode == "constant":
                continue
            taken = place < len(self.parameters) and occupancy.conflict(
                value, self.parameter_values[place], occupancy.first(value)
            )
            at_once = (
                place < len(self.parameters)
                and not taken
                and (occupancy.last(self.parameter_values[place]) == occupancy.first(value))
            )
            if not taken and not at_once:
                found[value] = frozenset((place,))
        self._bound = found
        return found

    def homes(self) -> dict[HloValue, int]:
        """Where results must end; one that is a result twice is copied and has its first place."""
        return dict(reversed(list(zip(self.results, self.result_place))))

    def place_of(self, group: list[HloValue]) -> int | None:
        """The allocation of a group, None for the arena."""
        for value in group:
            for place in self._bound.get(value, ()):
                if place >= 0:
                    return place
        return None

    def result_slices(self) -> tuple[Slice, ...]:
        """Where the results must be."""
        return tuple(Slice(p, 0, size) for p, size in zip(self.result_place, self.result_bytes))

    def allocations(self, constant_bytes: int, arena_bytes: int) -> tuple[Allocation, ...]:
        """The table."""
        made = [Allocation(k, "parameter", p.shape.byte_size, k) for k, p in enumerate(self.parameters)]
        count = len(made)
        made += [Allocation(count + k, "result", s, k) for k, s in enumerate(self.result_bytes)]
        made.append(Allocation(self.constants, "constant", constant_bytes))
        made.append(Allocation(self.arena, "arena", arena_bytes))
        return tuple(made)
