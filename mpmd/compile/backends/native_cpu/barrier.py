"""Where the devices of a mesh meet: memory that all of them see, and waiting that ends.

Each device's program runs on a thread of its own.  In a collective the devices of a group publish where their
arrays are, meet at a barrier, work on each other's arrays, and meet again.

A device that waits too long for the others withdraws from the barrier and writes in the memory of the mesh
that this launch has failed: from then on no device of this launch meets, and the call fails.  Either all of a
group have met or none has, so no device touches memory that another has freed, and barriers are as they were:
the next launch begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.threads import OPENED_AT, back_off
from mpmd.compile.llvm.cpu import LINE_BYTES
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant

DEVICES, BACK_OFF_LIMIT = 0, 8
"""Offsets in the memory of a mesh: how many devices it has, and after how many back-offs they give up."""

_FAILED = LINE_BYTES

LATE, MIXED = 1, 2
"""What can go wrong: a device does not come; devices come from different launches."""

REASON_BITS = 2
"""A launch is identified by its number in XLA plus one, above so many bits; the low bits are the reason."""

MESH_AT, DEVICE_AT, MET_AT, RUN_AT, MEETING_BYTES = 128, 136, 144, 152, 192
"""Behind a device's own barrier: its mesh's memory, its number, whether it has met the others, its launch."""

# A barrier: how many have come, a lock, the launch that they belong to (only where programs begin), and, on
# another cache line, how often it opened.
_LOCK, _LAUNCH = 8, 16
_BARRIER_BYTES = 2 * LINE_BYTES

# Rounds of waiting before the core is offered to others at each, and before the thread sleeps at each.
_SPINS, _YIELDS = 100, 300

MAX_BACK_OFFS = 600_000
"""Back-offs before a device gives up: a minute, or more on a busy machine.  Stopped processes make none."""


@dataclass(frozen=True)
class MeshLayout:
    """The memory that the devices of one program share.

    Attributes:
        devices: how many there are.
        arrays: how many arrays a device publishes, in all exchanges together.
        exchanges: how many exchanges the program has.
    """

    devices: int
    arrays: int
    exchanges: int

    def failed(self, device: int) -> int:
        """Offset at which a device reports the launch that failed, and the reason."""
        return _FAILED + 8 * device

    def array(self, device: int, number: int) -> int:
        """Offset at which `device` publishes the address of array `number`."""
        return _FAILED + _lines(8 * self.devices) + self.array_stride * device + 8 * number

    @property
    def array_stride(self) -> int:
        return _lines(8 * self.arrays)

    def barrier(self, exchange: int, leader: int) -> int:
        """Where a group waits; `leader` is its first device, exchange -1 the beginning."""
        return self.array(self.devices, 0) + _BARRIER_BYTES * ((exchange + 1) * self.devices + leader)

    @property
    def bytes(self) -> int:
        return self.barrier(self.exchanges, 0)


def _lines(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True)
class Begin:
    """`i64 name(ptr mesh, i64 device, ptr barrier, i64 devices, i64 run)`: waits for the devices of a launch.

    Returns 1 once all are there, 0 if some do not come.  Where devices wait for different launches,
    both fail: each device runs its launches in order, so the others cannot come any more.
    """

    @property
    def name(self) -> str:
        return "mpmd_begin"

    def emit(self, module: Module) -> None:
        with FunctionBuilder(module, self.name, _ARGUMENTS, result="i64") as f:
            _Barrier(f).begin()


@dataclass(frozen=True)
class Meet:
    """`i64 name(ptr mesh, i64 device, ptr barrier, i64 devices, i64 run)`: waits for the devices of a group.

    Returns 1 once all are there, 0 if the launch has failed or some do not come.  With 0 for the launch the
    others are sure to come, and the wait has no bound.
    """

    @property
    def name(self) -> str:
        return "mpmd_meet"

    def emit(self, module: Module) -> None:
        with FunctionBuilder(module, self.name, _ARGUMENTS, result="i64") as f:
            barrier = _Barrier(f)
            barrier.lock()
            barrier.meet(barrier.rounds())


_ARGUMENTS = [("mesh", "ptr"), ("device", "i64"), ("barrier", "ptr"), ("devices", "i64"), ("run", "i64")]

FUNCTIONS = (Begin(), Meet())
"""What programs of several devices call."""


class _Barrier:
    def __init__(self, f: FunctionBuilder) -> None:
        self.f = f
        self.mesh, self.count, self.run = (f.arguments[name] for name in ("mesh", "barrier", "run"))
        self.failed = f.offset(self.mesh, _FAILED)
        self.opened = f.offset(self.count, OPENED_AT)
        self.bounded = f.compare("ne", self.run, _number(0))

    def begin(self) -> None:
        f, rounds = self.f, self.rounds()
        launch = f.offset(self.count, _LAUNCH)
        with f.repeat() as leave_if:
            self.lock()
            with f.when(self._has_failed(self.run), returns=True, value=_number(0)):
                self.unlock()
            # The first to come, at an empty barrier, says for which launch it is.
            with f.when(f.compare("eq", f.load(self.count, "i64"), _number(0))):
                f.store(self.run, launch)
            other = f.load(launch, "i64")
            leave_if(f.compare("eq", other, self.run))
            # Another launch waits here. It cannot complete, which is reported for it; this one tries again
            # until those devices have left, or its time is over.
            with f.when(f.not_(self._has_failed(other))):
                self._fail(other, MIXED)
            self.unlock()
            with f.when(self._times_out(rounds), returns=True, value=_number(0)):
                self._fail(self.run, LATE)
            back_off(f, f.load(rounds, "i64"), _SPINS, _YIELDS)
        self.meet(rounds)

    def meet(self, rounds: Value) -> None:
        """Count this device, which holds the lock, and wait; returns 1 once all are there, 0 on a failure."""
        f = self.f
        # Under the lock: no device withdraws between the test for a failure and the count.
        before = f.atomic_load(self.opened)
        with f.when(self._gives_up(), returns=True, value=_number(0)):
            self.unlock()
        arrived = f.add(f.load(self.count, "i64"), _number(1))
        last = f.compare("eq", arrived, f.arguments["devices"])
        f.store(f.select(last, _number(0), arrived), self.count)
        with f.when(last):
            f.atomic_add(self.opened, 1)
        self.unlock()
        with f.repeat() as leave_if:
            leave_if(f.compare("ne", f.atomic_load(self.opened), before))
            given_up = self._and(self.bounded, self._or(self._times_out(rounds), self._gives_up()))
            with f.when(given_up, returns=True, value=_number(0)):
                self._withdraw(before)
            back_off(f, f.load(rounds, "i64"), _SPINS, _YIELDS)
        f.ret(_number(1))

    def _withdraw(self, before: Value) -> None:
        """Withdraw from the barrier and say why; if the last one has just come, all have met."""
        f = self.f
        self.lock()
        come = f.compare("ne", f.atomic_load(self.opened), before)
        with f.when(come, returns=True, value=_number(1)):
            self.unlock()
        with f.when(f.not_(self._has_failed(self.run))):
            self._fail(self.run, LATE)
        f.store(f.add(f.load(self.count, "i64"), _number(-1)), self.count)
        self.unlock()

    def rounds(self) -> Value:
        rounds = self.f.stack("i64")
        self.f.store(_number(0), rounds)
        return rounds

    def _times_out(self, rounds: Value) -> Value:
        """Count one more round; whether the limit is reached."""
        f = self.f
        limit = f.add(f.load(f.offset(self.mesh, BACK_OFF_LIMIT), "i64"), _number(_SPINS + _YIELDS))
        spent = f.add(f.load(rounds, "i64"), _number(1))
        f.store(spent, rounds)
        return f.compare("ugt", spent, limit)

    def lock(self) -> None:
        f = self.f
        with f.repeat() as leave_if:
            leave_if(f.compare("eq", f.atomic_exchange(f.offset(self.count, _LOCK), 1), _number(0)))
            f.call("sched_yield", result="i32")

    def unlock(self) -> None:
        self.f.atomic_store(_number(0), self.f.offset(self.count, _LOCK))

    def _fail(self, run: Value, reason: int) -> None:
        """Say that a launch has failed: each device has a place for the last that it knows of."""
        f = self.f
        own = f.offset(self.failed, f.imul(f.arguments["device"], 8))
        f.atomic_store(f.add(run, _number(reason)), own)

    def _has_failed(self, run: Value) -> Value:
        f = self.f
        return f.compare("ne", reason_of(f, self.mesh, run), _number(0))

    def _gives_up(self) -> Value:
        """Whether this device's launch has failed and it need not come."""
        return self._and(self.bounded, self._has_failed(self.run))

    def _and(self, a: Value, b: Value) -> Value:
        return self.f.op(f"and i1 {a}, {b}", "i1")

    def _or(self, a: Value, b: Value) -> Value:
        return self.f.op(f"or i1 {a}, {b}", "i1")


def reason_of(f: FunctionBuilder, mesh: Value, run: Value) -> Value:
    """Why a launch has failed; 0 if no device has reported a failure."""
    known_reason = f.stack("i64")
    f.store(_number(0), known_reason)
    with f.loop(0, f.load(f.offset(mesh, DEVICES), "i64")) as loop:
        # A report is the launch's identity plus a reason in its low bits: exclusive or leaves the reason
        # alone if it is of this launch, and a larger number if not.
        said = f.atomic_load(f.offset(mesh, f.iadd(f.imul(loop.i, 8), _FAILED)))
        reason = f.op(f"xor i64 {said}, {run}", "i64")
        known = f.compare("ult", reason, _number(1 << REASON_BITS))
        f.store(f.select(known, reason, f.load(known_reason, "i64")), known_reason)
    return f.load(known_reason, "i64")


def _number(value: int) -> Value:
    return constant(value, "i64")
