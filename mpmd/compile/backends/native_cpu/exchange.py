"""Collectives as steps of a native program: what the devices publish, and what each does with it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from mpmd.compile.backends.native_cpu.kernel import CpuKernel
from mpmd.compile.backends.native_cpu.meeting import (
    DEVICE_AT,
    MESH_AT,
    MET_AT,
    RUN_AT,
    Meet,
    MeshLayout,
)
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.types import Value, constant


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
        """Run the body on some devices only."""
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
        work = f.isub(high, low)
        begin = f.index(f.iadd(low, f.idiv(f.imul(work, entry.thread), entry.threads)))
        following = f.imul(work, f.iadd(entry.thread, 1))
        end = f.index(f.iadd(low, f.idiv(following, entry.threads)))
        with f.when(f.compare("slt", begin, end)):
            f.call(move.kernel.name, *places, entry.workspace, begin, end)
