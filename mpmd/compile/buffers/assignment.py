"""Buffer assignment: a slice of an allocation for every value of a scheduled program.

Allocations are the program's parameters, its results, its constants, and one arena for all other values in
each memory space.  A donated parameter and the result that takes its memory are one allocation; before a
result is written, its memory serves others (`sharing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpmd.compile.analysis.dataflow import Dataflow, HloValue
from mpmd.compile.analysis.liveness import LiveRange, Occupancy
from mpmd.compile.buffers.offsets import (
    ANY_MEMORY,
    DeviceMemory,
    LiveBlock,
    Packing,
    Room,
    bits,
    pack,
)
from mpmd.compile.buffers.sharing import MayShare, Sharing, reuse_outputs, space_of
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex
from mpmd.errors import CompileError


@dataclass(frozen=True)
class Allocation:
    """An allocation.

    Attributes:
        number: in the table.
        kind: `parameter`, `result`, `constant` or `arena`.
        size: bytes.
        index: number of the parameter or result; 0 otherwise.
        space: its memory space.
    """

    number: int
    kind: str
    size: int
    index: int = 0
    space: int = 0

    def __str__(self) -> str:
        name = f"{self.kind} {self.index}" if self.kind in ("parameter", "result") else self.kind
        space = f" in memory space {self.space}" if self.space else ""
        return f"allocation {self.number}: {name}, {self.size} bytes{space}"


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


Scratch = Callable[[HloInstruction], int]
"""Instruction → bytes that its kernel needs while it runs."""


@dataclass(frozen=True)
class BufferAssignment:
    """The slice of every value.

    Attributes:
        allocations: by number: parameters, results, constants, one arena per memory space, the default first.
        slices: per value.
        scratch: what kernels use while they run, per instruction.
        results: the slice where each result must be at the end; its value may be elsewhere.
        constants: the values in the slices of the constants' allocation.
        occupancy: live ranges with holes.
        packings: how each memory space's arena was packed.
        reused: bytes of temporaries in output buffers.
    """

    allocations: tuple[Allocation, ...]
    slices: Mapping[HloValue, Slice]
    scratch: Mapping[HloInstruction, Slice]
    results: tuple[Slice, ...]
    constants: tuple[HloValue, ...]
    occupancy: Occupancy
    packings: Mapping[int, Packing]
    reused: int = 0

    def at(self, instruction: HloInstruction, index: ShapeIndex = ()) -> Slice:
        return self.slices[self.occupancy.dataflow.value_at(instruction, index)]

    @property
    def arenas(self) -> tuple[Allocation, ...]:
        """One per memory space, the default first."""
        return tuple(a for a in self.allocations if a.kind == "arena")

    @property
    def arena_bytes(self) -> int:
        return self.arenas[0].size

    @property
    def constant_bytes(self) -> int:
        return self.allocations[self.arenas[0].number - 1].size

    @property
    def packing(self) -> Packing:
        return self.packings[0]


def _no_scratch(instruction: HloInstruction) -> int:
    return 0


def assign_buffers(
    module: HloModule,
    may_share: MayShare,
    scratch: Scratch = _no_scratch,
    memory: DeviceMemory = ANY_MEMORY,
) -> BufferAssignment:
    """Memory for every value of a scheduled program with a flat call graph.

    Args:
        module: parameters and results are arrays; `input_output_alias` names those that share memory.
            Every result of the program, of a loop's body and of a branch has a value of its own
            (`hlo-copy-insertion`).
        may_share: which operands results may overwrite.
        scratch: bytes that kernels need beside their operands and results.
        memory: the device's.

    Raises:
        CompileError: a parameter or result is a tuple, the calls are not flat, or values are in a memory
            space that the device does not have.
    """
    dataflow = Dataflow(module)
    if not dataflow.graph.is_flat():
        raise CompileError(
            f"module {module.name} has computations that are called from several places\n"
            f"  run hlo-flatten-call-graph first"
        )
    interface = _Interface(module, dataflow)
    occupancy = Occupancy(dataflow)
    sharing = Sharing(occupancy, interface.bound(occupancy), interface.output_buffers(), may_share)
    layout = _ValueOffsets(interface, occupancy, memory)
    for group in sharing.groups():
        layout.add(group)
    for instruction, instant in occupancy.instants.items():
        layout.add_scratch(instruction, instant, scratch)
    return layout.finish()


class _ValueOffsets:
    """Slices of groups of values, as they are assigned."""

    def __init__(self, interface: _Interface, occupancy: Occupancy, memory: DeviceMemory) -> None:
        self.interface = interface
        self.memory = memory
        self.occupancy = occupancy
        self.slices: dict[HloValue, Slice] = {}
        self.scratch: dict[HloInstruction, Slice] = {}
        self.constants: list[HloValue] = []
        self.constant_bytes = 0
        self.busy: dict[int, list[LiveRange]] = {}
        self.blocks: dict[int, list[tuple[LiveBlock, list[HloValue] | HloInstruction]]] = {0: []}

    def add(self, group: list[HloValue]) -> None:
        size, place = max(v.byte_size for v in group), self.interface.place_of(group)
        if group[0].instruction.opcode == "constant":
            self.slices[group[0]] = Slice(self.interface.constants, self.constant_bytes, size)
            self.constants += group
            self.constant_bytes += self.memory.aligned(size)
        elif place is not None:
            self.slices.update((v, Slice(place, 0, v.byte_size)) for v in group)
            self.busy.setdefault(place, []).extend(self.occupancy.together(group))
        else:
            block = LiveBlock(size, self.occupancy.together(group))
            self.blocks.setdefault(space_of(group[0]), []).append((block, group))

    def add_scratch(self, instruction: HloInstruction, instant: int, scratch: Scratch) -> None:
        """Scratch memory of an instruction's kernel, if it needs any."""
        size = scratch(instruction)
        if size:
            self.blocks[0].append((LiveBlock(size, (LiveRange(instant, instant),)), instruction))

    def finish(self) -> BufferAssignment:
        self._check_spaces()
        interface, packings, reused = self.interface, {}, 0
        for number, space in enumerate(sorted(self.blocks)):
            blocks = [b for b, _ in self.blocks[space]]
            rooms = interface.rooms(space, self.busy, self.occupancy.liveness.time.length, self.memory)
            reuses = reuse_outputs(blocks, rooms)
            reused += sum(blocks[k].size for k in reuses)
            kept = [k for k in range(len(blocks)) if k not in reuses]
            packing = packings[space] = pack([blocks[k] for k in kept], self.memory)
            places = {k: (interface.arena + number, at) for k, at in zip(kept, packing.offsets)} | reuses
            for k, (block, owner) in enumerate(self.blocks[space]):
                if isinstance(owner, HloInstruction):
                    self.scratch[owner] = Slice(*places[k], block.size)
                else:
                    self.slices.update((v, Slice(*places[k], v.byte_size)) for v in owner)
        return BufferAssignment(
            interface.allocations(self.constant_bytes, {s: p.size for s, p in packings.items()}),
            self.slices,
            self.scratch,
            interface.result_slices(),
            tuple(self.constants),
            self.occupancy,
            packings,
            reused,
        )

    def _check_spaces(self) -> None:
        known = self.memory.spaces
        other = sorted(space for space in self.blocks if known is not None and space not in known)
        if other:
            raise CompileError(
                f"values are in memory space {', '.join(map(str, other))}\n"
                f"  the target has memory space {', '.join(map(str, known or ()))}"
            )


class _Interface:
    """Entry parameters and results, and which of them share memory."""

    def __init__(self, module: HloModule, dataflow: Dataflow) -> None:
        self.module = module
        self.parameters = module.entry.parameters
        root = module.entry.root
        leaves = list(root.shape.leaves())
        shapes = [p.shape for p in self.parameters] + [s for _, s in leaves]
        if not all(s.is_array for s in shapes):
            raise CompileError(
                f"module {module.name}: parameters and results must be arrays, "
                f"got {next(str(s) for s in shapes if not s.is_array)}\n"
                "  give the elements of tuples one by one"
            )
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
        places: dict[HloValue, frozenset[int]] = {}
        for number, value in enumerate(self.parameter_values):
            # -1: nothing else may be written there
            places[value] = frozenset((number,)) if number in self.given else frozenset((number, -1))
        for value, place in zip(self.results, self.result_place):
            if value in places or value.instruction.opcode == "constant":
                continue
            given = place < len(self.parameters)
            if not (given and occupancy.conflict(value, self.parameter_values[place])):
                places[value] = frozenset((place,))
        self._bound = places
        return places

    def output_buffers(self) -> dict[HloValue, int]:
        """Where results must end; a value that is a result twice is copied and has its first position."""
        return dict(reversed(list(zip(self.results, self.result_place))))

    def place_of(self, group: list[HloValue]) -> int | None:
        """The allocation of a group, None for the arena."""
        for value in group:
            for place in self._bound.get(value, ()):
                if place >= 0:
                    return place
        return None

    def result_slices(self) -> tuple[Slice, ...]:
        return tuple(Slice(p, 0, size) for p, size in zip(self.result_place, self.result_bytes))

    def rooms(
        self, space: int, busy: Mapping[int, list[LiveRange]], end: int, memory: DeviceMemory
    ) -> dict[int, Room]:
        """Output buffers that temporaries may use while they are free, by allocation.

        At the end results that are elsewhere are copied to their output buffers, so nothing else may be there
        then.
        """
        return {
            place: Room(size, bits(busy.get(place, ())) | 1 << end, memory)
            for value, place, size in zip(self.results, self.result_place, self.result_bytes)
            if space_of(value) == space and size
        }

    def allocations(self, constant_bytes: int, arenas: Mapping[int, int]) -> tuple[Allocation, ...]:
        allocations = [
            Allocation(k, "parameter", v.byte_size, k, space_of(v))
            for k, v in enumerate(self.parameter_values)
        ]
        count = len(allocations)
        allocations += [
            Allocation(count + k, "result", size, k, space_of(v))
            for k, (v, size) in enumerate(zip(self.results, self.result_bytes))
        ]
        allocations.append(Allocation(self.constants, "constant", constant_bytes))
        for number, (space, size) in enumerate(sorted(arenas.items())):
            allocations.append(Allocation(self.arena + number, "arena", size, 0, space))
        return tuple(allocations)
