"""The handler of a program of several devices: find its device, meet the others, run.

XLA calls the handler once per device and launch.  It launches programs of several devices one after the
other, each device on a thread that nothing else holds, so devices may wait for each other.  What XLA promises
is checked: devices that come from different launches, or do not come at all, make the call fail, not hang.
"""

from __future__ import annotations

from collections.abc import Callable

from mpmd.compile.backends.ffi.frame import FfiFrame
from mpmd.compile.backends.native_cpu.meeting import (
    LATE,
    MESH_AT,
    MET_AT,
    MIXED,
    REASON_BITS,
    RUN_AT,
    Begin,
    reason_of,
)
from mpmd.compile.backends.native_cpu.program import ThreadedProgram
from mpmd.compile.llvm.types import Value, constant

SLOT = {"busy": 0, "arena": 8, "workspace": 16, "barrier": 24, "pool": 32, "log": 40}
"""A slot: its own busy flag, then pointers; the log's is null while no call is timed.

The numbers of the devices in XLA follow the slots."""

SLOT_BYTES = 64

_NULL = Value("null", "ptr")


class MeshCall:
    """Emission of the part of a handler that begins once its buffers are counted.

    Args:
        frame: the frame of the call.
        program: what it runs.
    """

    def __init__(self, frame: FfiFrame, program: ThreadedProgram) -> None:
        self.f = f = frame.f
        self.frame = frame
        self.program = program
        self.slots = f.load(Value(f"@{program.name}_slots", "ptr"), "ptr")

    def emit(self, run: Callable[[Value], None]) -> None:
        """Everything until the handler returns; `run` emits the program's run on a slot."""
        f = self.f
        number = self._number()
        slot = f.offset(self.slots, f.imul(number, SLOT_BYTES))
        with f.repeat() as leave_if:
            was_busy = f.atomic_exchange(f.offset(slot, SLOT["busy"]), 1)
            leave_if(f.compare("eq", was_busy, constant(0, "i64")))
            f.call("sched_yield", result="i32")
        if self.program.mesh is None:
            run(slot)
            self._leave(slot)
            f.ret(_NULL)
            return
        own = f.load(f.offset(slot, SLOT["barrier"]), "ptr")
        mesh = f.load(f.offset(own, MESH_AT), "ptr")
        launch = self._begin(number, own, mesh)
        with f.when(f.compare("ne", f.load(f.offset(own, MET_AT), "i64"), constant(0, "i64"))):
            run(slot)
        met = f.compare("ne", f.load(f.offset(own, MET_AT), "i64"), constant(0, "i64"))
        reason = reason_of(f, mesh, launch)
        self._leave(slot)
        self._return_failures(met, reason)
        f.ret(_NULL)

    def _leave(self, slot: Value) -> None:
        self.f.atomic_store(constant(0, "i64"), self.f.offset(slot, SLOT["busy"]))

    def _number(self) -> Value:
        f, devices = self.f, self.program.devices
        ordinal = self.frame.device()
        known = f.offset(self.slots, SLOT_BYTES * devices)
        number = constant(devices, "i64")
        for k in range(devices):
            here = f.compare("eq", f.load(known, "i64", k), ordinal)
            number = f.select(here, constant(k, "i64"), number)
        self._fail_if(
            f.compare("eq", number, constant(devices, "i64")),
            "elsewhere",
            "was called on a device that it was not loaded for",
        )
        return number

    def _begin(self, number: Value, own: Value, mesh: Value) -> Value:
        """Wait until the devices of one launch are there; returns the identity of the launch."""
        f, layout = self.f, self.program.mesh
        assert layout is not None
        following = f.add(self.frame.ask("run_id", 32), constant(1, "i64"))
        launch = f.op(f"shl i64 {following}, {REASON_BITS}", "i64")
        f.store(launch, f.offset(own, RUN_AT))
        barrier, everybody = f.offset(mesh, layout.barrier(-1, 0)), constant(layout.devices, "i64")
        met = f.call(Begin().name, mesh, number, barrier, everybody, launch, result="i64")
        assert met is not None
        f.store(met, f.offset(own, MET_AT))
        return launch

    def _return_failures(self, met: Value, reason: Value) -> None:
        """Fail if this device did not always meet the others, or one says that this launch has failed."""
        f = self.f
        late = f.op(f"or i1 {f.not_(met)}, {f.compare('eq', reason, constant(LATE, 'i64'))}", "i1")
        self._fail_if(
            f.compare("eq", reason, constant(MIXED, "i64")),
            "mixed",
            "was called by devices of different launches at the same time",
        )
        self._fail_if(
            late,
            "late",
            "waited too long for the other devices of its mesh: one did not come, or took another branch",
        )

    def _fail_if(self, condition: Value, symbol: str, message: str) -> None:
        name = self.program.name
        self.frame.fail_if(condition, f"{name}_{symbol}", f"native program {name} {message}")
