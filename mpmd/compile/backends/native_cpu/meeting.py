"""Where the devices of a mesh meet: memory that all of them see, and waiting that ends.

Each device's program runs on a thread of its own.  In a collective the devices of a group publish where their
arrays lie, wait for each other, work on each other's arrays, and wait again before anyone goes on.  Who waits
too long for the others to come says so in the memory of the mesh: from then on nobody meets, and the call
fails.  Either all of a group have met or none has, so nobody touches memory that another has given back.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant

_LINE = 64

# the memory of a mesh: what went wrong, how many naps to wait, then a launch per device
FAILED, PATIENCE = 0, 8
_RUNS = _LINE

LATE, MIXED = 1, 2
"""What can go wrong: a device does not come; devices come from different launches."""

MESH_AT, DEVICE_AT, MET_AT, MEETING_BYTES = 128, 136, 144, 192
"""Behind a device's own barrier: its mesh's memory, its number, whether it met the others the last time."""

_LOCK, _OPENED = 8, _LINE

# Rounds of waiting before the core is given away at each, and before naps are taken instead.
_SPINS, _YIELDS, _NAP_US = 100, 300, 50

PATIENCE_NAPS = 600_000
"""Naps before a device gives up: a minute, or more on a busy machine.  Stopped processes take none."""


@dataclass(frozen=True)
class MeshLayout:
    """The memory that the devices of one program share.

    Attributes:
        devices: how many there are.
        arrays: how many arrays a device publishes at most.
        meetings: how many different ways of grouping the devices there are.
    """

    devices: int
    arrays: int
    meetings: int

    def run(self, device: int) -> int:
        """Where a device says which launch it belongs to."""
        return _RUNS + 8 * device

    @property
    def _arrays(self) -> int:
        return _lines(_RUNS + 8 * self.devices)

    def array(self, device: int, number: int) -> int:
        """Where a device says where one of its arrays lies."""
        return self._arrays + self.array_stride * device + 8 * number

    @property
    def array_stride(self) -> int:
        """From one device's arrays to the next one's."""
        return _lines(8 * self.arrays)

    def barrier(self, meeting: int, leader: int) -> int:
        """Where the devices of a group, of which `leader` is the first, wait for each other."""
        return self.array(self.devices, 0) + 2 * _LINE * (meeting * self.devices + leader)

    @property
    def bytes(self) -> int:
        """Size of the memory."""
        return self.barrier(self.meetings, 0)


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


@dataclass(frozen=True)
class Meet:
    """`i64 name(ptr mesh, ptr barrier, i64 devices, i64 bounded)`: 1 once all are there, 0 if some stay away.

    The barrier is a count, a lock around it, and, on another cache line, the number of times that it opened.
    Who is not `bounded` waits for devices that are sure to come.
    """

    @property
    def name(self) -> str:
        """Its symbol."""
        return "mpmd_meet"

    def emit(self, module: Module) -> None:
        """Add the function to a module."""
        arguments = [("mesh", "ptr"), ("barrier", "ptr"), ("devices", "i64"), ("bounded", "i64")]
        with FunctionBuilder(module, self.name, arguments, result="i64") as f:
            _Meeting(f).emit()


class _Meeting:
    """Emission of `Meet`."""

    def __init__(self, f: FunctionBuilder) -> None:
        self.f = f
        self.mesh, self.count = f.arguments["mesh"], f.arguments["barrier"]
        self.failed = f.offset(self.mesh, FAILED)
        self.opened = f.offset(self.count, _OPENED)
        self.bounded = f.compare("ne", f.arguments["bounded"], _number(0))

    def emit(self) -> None:
        f = self.f
        before = self._arrive()
        rounds = f.stack("i64")
        f.store(_number(0), rounds)
        patience = f.add(f.load(f.offset(self.mesh, PATIENCE), "i64"), _number(_SPINS + _YIELDS))
        with f.repeat() as leave_if:
            leave_if(f.compare("ne", f.atomic_load(self.opened), before))
            spent = f.add(f.load(rounds, "i64"), _number(1))
            f.store(spent, rounds)
            tired = f.compare("ugt", spent, patience)
            done_with_it = self._and(self.bounded, self._or(tired, self._has_failed()))
            with f.when(done_with_it, returns=True, value=_number(0)):
                self._stand_back(before)
            _pass_time(f, spent)
        f.ret(_number(1))

    def _arrive(self) -> Value:
        """Count this device; returns how often the barrier had opened before."""
        f = self.f
        self._lock()
        before = f.atomic_load(self.opened)
        with f.when(self._and(self.bounded, self._has_failed()), returns=True, value=_number(0)):
            self._unlock()
        arrived = f.add(f.load(self.count, "i64"), _number(1))
        with f.when(f.compare("eq", arrived, f.arguments["devices"]), returns=True, value=_number(1)):
            f.store(_number(0), self.count)
            f.atomic_add(self.opened, 1)
            self._unlock()
        f.store(arrived, self.count)
        self._unlock()
        return before

    def _stand_back(self, before: Value) -> None:
        """Take back the arrival and say why; if the last one has just come, all have met."""
        f = self.f
        self._lock()
        come = f.compare("ne", f.atomic_load(self.opened), before)
        with f.when(come, returns=True, value=_number(1)):
            self._unlock()
        with f.when(f.not_(self._has_failed())):
            f.atomic_store(_number(LATE), self.failed)
        f.store(f.add(f.load(self.count, "i64"), _number(-1)), self.count)
        self._unlock()

    def _lock(self) -> None:
        f = self.f
        with f.repeat() as leave_if:
            leave_if(f.compare("eq", f.atomic_exchange(f.offset(self.count, _LOCK), 1), _number(0)))
            f.call("sched_yield", result="i32")

    def _unlock(self) -> None:
        self.f.atomic_store(_number(0), self.f.offset(self.count, _LOCK))

    def _has_failed(self) -> Value:
        return self.f.compare("ne", self.f.atomic_load(self.failed), _number(0))

    def _and(self, a: Value, b: Value) -> Value:
        return self.f.op(f"and i1 {a}, {b}", "i1")

    def _or(self, a: Value, b: Value) -> Value:
        return self.f.op(f"or i1 {a}, {b}", "i1")


def _number(value: int) -> Value:
    return constant(value, "i64")


def _pass_time(f: FunctionBuilder, spent: Value) -> None:
    """Spin at first, then let others have the core, then sleep."""
    spins, yields = _number(_SPINS), _number(_SPINS + _YIELDS)
    with f.when(f.compare("ule", spent, spins)):
        f.pause()
    with f.when(f.compare("ugt", spent, spins)):
        with f.when(f.compare("ule", spent, yields)):
            f.call("sched_yield", result="i32")
        with f.when(f.compare("ugt", spent, yields)):
            f.call("usleep", constant(_NAP_US, "i32"), result="i32")
