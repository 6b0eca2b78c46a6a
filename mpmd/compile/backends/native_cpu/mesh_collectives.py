"""Collectives between CPU devices, as steps of a native program: kernels on the arrays of other devices.

The devices of a mesh are threads of one process.  Each publishes the addresses of its arrays, and reads the
parts that it gets from its peers' operands; in an all-reduce each reduces a share of the elements and also
writes them to its peers' results.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from mpmd.compile.backends.native_cpu.barrier import DEVICE_AT, MESH_AT, MET_AT, RUN_AT, Meet, MeshLayout
from mpmd.compile.backends.native_cpu.shared import CpuKernel
from mpmd.compile.kernels.index import Index, dim, linear
from mpmd.compile.kernels.kernel_plan import KernelPlan, Load
from mpmd.compile.kernels.plan_builder import PlanBuilder, renumbered
from mpmd.compile.kernels.planner.collectives import CollectiveArray, CollectivePlan
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import Value, constant


@dataclass(frozen=True)
class Address:
    """A place in memory.

    Attributes:
        entry: number of the pointer in the table.
        offset: bytes after it.
    """

    entry: int
    offset: int = 0


@dataclass(frozen=True)
class Peer:
    """A pointer of a kernel in an exchange.

    Attributes:
        member: position in the device's list of members; -1 for the device itself.
        array: number of the array that the member published; of the device itself, its address.
        stride: bytes to go further per rank of the device.
    """

    member: int
    array: int | Address
    stride: int = 0


@dataclass(frozen=True)
class Move:
    """A kernel on the arrays of several devices.

    Attributes:
        kernel: the kernel.
        places: where each of its pointers points.
        shared: whether each member does its share of the units; else the device does all.
        devices: which devices run it; all if None.
    """

    kernel: CpuKernel
    places: Mapping[str, Peer]
    shared: bool = False
    devices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Exchange:
    """Devices meet, work on each other's arrays, and meet again; then their arrays are their own.

    Attributes:
        number: of the exchange in its program.
        groups: devices that wait for each other.
        arrays: what this device publishes.
        first: number of the first of them among all arrays that the program publishes.
        members: per device the devices whose arrays it touches, as many for each.
        ranks: per device its place among them.
        moves: the copies and reductions.
    """

    number: int
    groups: tuple[tuple[int, ...], ...]
    arrays: tuple[Address, ...]
    first: int
    members: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class WriteDevice:
    """The number of the device goes to an `u32`.

    Attributes:
        target: where.
    """

    target: Address


class Entry(Protocol):
    """The entry of a program under construction."""

    f: FunctionBuilder
    thread: Value
    threads: Value
    workspace: Value
    barrier: Value

    def wait(self) -> None:
        """Let all threads of this device come so far."""

    def address(self, address: Address) -> Value:
        """A place in memory as a pointer."""


class ExchangeEntry:
    """Emission of exchanges.

    Args:
        entry: the entry of the program.
        name: of the program.
        layout: the memory that the devices share.
    """

    def __init__(self, entry: Entry, name: str, layout: MeshLayout) -> None:
        self.entry = entry
        self.f = entry.f
        self.name = name
        self.layout = layout
        self.mesh = self.f.load(self.f.offset(entry.barrier, MESH_AT), "ptr")
        self.device = self.f.load(self.f.offset(entry.barrier, DEVICE_AT), "i64")

    def exchange(self, step: Exchange) -> None:
        """Publish and meet, work, meet again; all threads of this device have come so far.

        Devices that have met are sure to come a second time, so that this wait has no bound.
        """
        f, entry = self.f, self.entry
        met = f.offset(entry.barrier, MET_AT)
        with self._first_thread(), self._if_met():
            own = self._arrays_of(self.device)
            for number, address in enumerate(step.arrays):
                f.store(entry.address(address), own, step.first + number)
            f.store(self._meet(step, f.load(f.offset(entry.barrier, RUN_AT), "i64")), met)
        entry.wait()
        with self._if_met():
            # From here on addresses are of peers, whose arrays stay where they are until all have met
            # again.
            members = [self._arrays_of(m) for m in self._row(step.members)]
            (rank,) = self._row([(r,) for r in step.ranks])
            for move in step.moves:
                with self._only(move.devices):
                    places = [
                        self._place(move.places[p], members, rank, step.first) for p in move.kernel.pointers
                    ]
                    self._move(move, places, rank, len(step.members[0]))
        entry.wait()
        with self._first_thread(), self._if_met():
            self._meet(step, constant(0, "i64"))

    def _arrays_of(self, device: Value) -> Value:
        f, layout = self.f, self.layout
        return f.offset(self.mesh, f.iadd(f.imul(device, layout.array_stride), layout.array(0, 0)))

    def _first_thread(self) -> AbstractContextManager[None]:
        return self.f.when(self.f.compare("eq", self.entry.thread, constant(0, "i64")))

    def _if_met(self) -> AbstractContextManager[None]:
        """Do the body only if this device has always met the others of this launch."""
        f = self.f
        met = f.load(f.offset(self.entry.barrier, MET_AT), "i64")
        return f.when(f.compare("ne", met, constant(0, "i64")))

    def _meet(self, step: Exchange, run: Value) -> Value:
        """Wait for the other devices of this one's group; see `Meet`."""
        layout = self.layout
        table = [(layout.barrier(step.number, d), 1) for d in range(layout.devices)]
        for group in step.groups:
            for device in group:
                table[device] = (layout.barrier(step.number, group[0]), len(group))
        # One program for all devices: what differs between them is looked up by the device's number. Each
        # group has a barrier of its own, under the number of its first device.
        offset, count = self._row(table)
        barrier = self.f.offset(self.mesh, offset)
        met = self.f.call(Meet().name, self.mesh, self.device, barrier, count, run, result="i64")
        assert met is not None
        return met

    def _row(self, table: Sequence[Sequence[int]]) -> list[Value]:
        f, width = self.f, len(table[0])
        if len({tuple(row) for row in table}) == 1:
            return [constant(v, "i64") for v in table[0]]
        values = ", ".join(f"i64 {v}" for row in table for v in row)
        name = f"{self.name}_table{hashlib.sha256(values.encode()).hexdigest()[:12]}"
        f.module.add_global(name, f"internal constant [{width * len(table)} x i64] [{values}]")
        row = f.offset(Value(f"@{name}", "ptr"), f.imul(self.device, 8 * width))
        return [f.load(row, "i64", k) for k in range(width)]

    def _place(self, peer: Peer, members: Sequence[Value], rank: Value, first: int) -> Value:
        f = self.f
        if isinstance(peer.array, Address):
            base = self.entry.address(peer.array)
        else:
            base = f.load(members[peer.member], "ptr", first + peer.array)
        return f.offset(base, f.imul(rank, peer.stride)) if peer.stride else base

    @contextlib.contextmanager
    def _only(self, devices: tuple[int, ...] | None) -> Iterator[None]:
        if devices is None:
            yield
            return
        (chosen,) = self._row([(int(d in devices),) for d in range(self.layout.devices)])
        with self.f.when(self.f.compare("ne", chosen, constant(0, "i64"))):
            yield

    def _move(self, move: Move, places: Sequence[Value], rank: Value, members: int) -> None:
        """This thread's share of this device's share of a kernel."""
        f, units, entry = self.f, move.kernel.units, self.entry
        low, high = f.index(0), f.index(units)
        if move.shared:
            low = f.index(f.idiv(f.imul(rank, units), members))
            high = f.index(f.idiv(f.imul(f.iadd(rank, 1), units), members))
        # first the device's share of the group's units, then this thread's share of that
        work = f.isub(high, low)
        begin = f.index(f.iadd(low, f.idiv(f.imul(work, entry.thread), entry.threads)))
        following = f.imul(work, f.iadd(entry.thread, 1))
        end = f.index(f.iadd(low, f.idiv(following, entry.threads)))
        with f.when(f.compare("slt", begin, end)):
            f.call(move.kernel.name, *places, entry.workspace, begin, end)


OWN = -1
"""The member that stands for the device itself."""

_MAX_MEMBERS = 16
"""Devices of a group: beyond this a kernel would take too many pointers."""


@dataclass(frozen=True)
class Pointer:
    """Where a kernel of a collective finds an array.

    Attributes:
        array: number among the operands, then the results, of the collective.
        member: whose array: a position in the device's list of members, or `OWN`.
        stride: elements to go further per rank of the device.
    """

    array: int
    member: int = OWN
    stride: int = 0


@dataclass(frozen=True)
class PeerKernel:
    """A kernel that devices run while all of them are there.

    Attributes:
        plan: what it computes.
        pointers: one per operand of the plan.
        shared: whether each member does only its share of the work's units.
        devices: which devices run it; all if None.
    """

    plan: KernelPlan
    pointers: tuple[Pointer, ...]
    shared: bool = False
    devices: tuple[int, ...] | None = None


def peer_refusal(plan: CollectivePlan) -> str:
    """Why no kernels carry out a collective; "" if they do: each device addresses as many others."""
    sizes = sorted({len(group) for group in plan.groups})
    if len(sizes) > 1 or (not _is_permute(plan) and sizes[-1] > _MAX_MEMBERS):
        return f"native code joins groups of one size, at most {_MAX_MEMBERS}; these have {sizes} devices"
    return ""


def members_of(plan: CollectivePlan) -> tuple[tuple[int, ...], ...]:
    """Per device the devices whose arrays its kernels touch, as many for each."""
    return tuple(tuple(s for s, _ in sources) or (d,) for d, sources in enumerate(plan.sources))


def ranks_of(plan: CollectivePlan) -> tuple[int, ...]:
    """Per device its place in its group."""
    rank = {device: place for group in plan.groups for place, device in enumerate(group)}
    return tuple(rank[d] for d in range(plan.devices))


def published(kernels: Sequence[PeerKernel]) -> tuple[int, ...]:
    """Numbers of the arrays that kernels of other devices touch."""
    return tuple(sorted({p.array for kernel in kernels for p in kernel.pointers if p.member != OWN}))


def peer_kernels(plan: CollectivePlan) -> list[PeerKernel]:
    """The kernels of a collective that is not refused, but for empty arrays."""
    kernels: list[PeerKernel] = []
    for number, array in enumerate(plan.arrays):
        result = len(plan.arrays) + number
        if not array.size:
            continue
        if _is_permute(plan):
            kernels += _permute(plan, array, number, result)
        elif plan.opcode == "all-reduce":
            kernels.append(_all_reduce(plan, array, number, result))
        else:
            kernels.append(_collected(plan, array, number, result))
    return kernels


def _is_permute(plan: CollectivePlan) -> bool:
    return plan.opcode in ("collective-permute", "collective-broadcast")


def _all_reduce(plan: CollectivePlan, array: CollectiveArray, number: int, result: int) -> PeerKernel:
    """Every member reduces its share of the elements and writes it to the results of all."""
    members = range(len(plan.groups[0]))
    build = PlanBuilder("kernel", (array.size,))
    sources = [build.operand("", array.dtype, array.size) for _ in members]
    total = _reduced(build, array, [build.load(s, dim(0)) for s in sources])
    for _ in members:
        build.store(build.operand("", array.dtype, array.size), dim(0), total)
    pointers = [*(Pointer(number, m) for m in members), *(Pointer(result, m) for m in members)]
    return PeerKernel(build.finish(), tuple(pointers), shared=True)


def _collected(plan: CollectivePlan, array: CollectiveArray, number: int, result: int) -> PeerKernel:
    """Every member reduces or copies the parts that it gets from all."""
    count, elements = len(plan.groups[0]), array.elements
    build = PlanBuilder("kernel", (array.rows, elements))
    whole = array.size - (array.parts - 1) * elements  # from a part's beginning in the first row on
    sources = [build.operand("", array.dtype, whole) for _ in range(count)]
    loads = [build.load(s, _in_part(array.parts * elements)) for s in sources]
    place, width = count * elements, count
    if array.reduction is not None:
        loads, place, width = [_reduced(build, array, loads)], elements, 1
    target = build.operand("", array.dtype, array.rows * elements * width)
    for m, value in enumerate(loads):
        build.store(target, _in_part(place, m * elements), value)
    stride = elements if array.parts > 1 else 0
    return PeerKernel(build.finish(), (*(Pointer(number, m, stride) for m in range(count)), Pointer(result)))


def _permute(plan: CollectivePlan, array: CollectiveArray, number: int, result: int) -> list[PeerKernel]:
    """Every target copies its source's operand; the other devices write zeros."""
    targets = tuple(d for d, sources in enumerate(plan.sources) if sources)
    others = tuple(d for d, sources in enumerate(plan.sources) if not sources)
    build = PlanBuilder("kernel", (array.size,))
    source, target = (build.operand("", array.dtype, array.size) for _ in range(2))
    build.store(target, dim(0), build.load(source, dim(0)))
    pointers = (Pointer(number, 0), Pointer(result))
    kernels = [PeerKernel(build.finish(), pointers, devices=None if not others else targets)]
    if others:
        build = PlanBuilder("kernel", (array.size,))
        zero = build.constant(False if array.dtype == "pred" else 0, array.dtype)
        build.store(build.operand("", array.dtype, array.size), dim(0), zero)
        kernels.append(PeerKernel(build.finish(), (Pointer(result),), devices=others))
    return kernels


def _in_part(stride: int, offset: int = 0) -> Index:
    """Element `dim 1` of a part in row `dim 0` of rows that are `stride` elements apart."""
    return linear([dim(0), dim(1)], [stride, 1], offset)


def _reduced(build: PlanBuilder, array: CollectiveArray, values: Sequence[int]) -> int:
    """The reduction of one value per member, in their order."""
    reduction = array.reduction
    assert reduction is not None
    dtype = reduction.operands[0].dtype
    total = build.convert(values[0], dtype)
    for value in values[1:]:
        given, numbers = (total, build.convert(value, dtype)), dict[int, int]()
        for number, node in enumerate(reduction.nodes):
            if isinstance(node, Load):
                numbers[number] = given[node.operand]
            else:
                numbers[number] = build.node(renumbered(node, numbers))
        total = numbers[reduction.stores[0].node]
    return build.convert(total, array.dtype)
