"""The handler of a native program, emitted as LLVM IR: what XLA calls for a custom call.

    XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame)

reads the data pointers of all arguments and results, takes a free slot (arena, workspaces, threads), runs the
program, and frees the slot.  If the slot has a log it writes there when the program began and ended.  On a
mesh of several devices XLA calls it once per device and launch; every device has a slot, and devices that
exchange data meet before they begin.  XLA launches such programs one after the other, each device on a thread
that nothing else holds, so devices may wait for each other.  This promise is checked: devices that come from
different launches, or do not come at all, make the call fail, not hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpmd.compile.backends.ffi.frame import FfiFrame, emit_entry, emit_now
from mpmd.compile.backends.native_cpu.barrier import (
    LATE,
    MESH_AT,
    MET_AT,
    MIXED,
    REASON_BITS,
    RUN_AT,
    Begin,
    reason_of,
)
from mpmd.compile.backends.native_cpu.loading import CompiledProgram, compile_program
from mpmd.compile.backends.native_cpu.native_program import ThreadedProgram
from mpmd.compile.backends.native_cpu.overrides import Override
from mpmd.compile.backends.native_cpu.threads import PoolRun
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant
from mpmd.errors import CompileError


def compile_with_handler(
    program: ThreadedProgram,
    target: CpuTarget,
    *,
    arguments: int,
    results: int,
    arena: bool,
    overrides: Mapping[str, Override] | None = None,
) -> CompiledProgram:
    """Machine code of a program and of its handler, `<name>_handler`.

    The program's table is: arguments, results, then the arena if it has one.  `overrides` are kernels from
    files, by their names.

    Raises:
        CompileError: the program expects another number of pointers, or a kernel from a file does not fit.
    """
    wanted = arguments + results + arena
    if program.pointers != wanted:
        raise CompileError(
            f"program {program.name} takes {program.pointers} pointers; {arguments} arguments, "
            f"{results} results{' and an arena' if arena else ''} make {wanted}"
        )
    module = Module(target)
    module.add_global(f"{program.name}_slots", "internal global ptr null")
    module.add_global(f"{program.name}_slot_count", "internal global i64 0")
    _emit_bind(module, program.name)
    _Handler(module, program, arguments, results, arena).emit()
    return compile_program(program, target, module, overrides)


def _emit_bind(module: Module, name: str) -> None:
    """`void <name>_bind(ptr slots, i64 count)`: where the handler finds its slots."""
    arguments = [("slots", "ptr"), ("count", "i64")]
    with FunctionBuilder(module, f"{name}_bind", arguments, plain=True) as f:
        f.store(f.arguments["slots"], Value(f"@{name}_slots", "ptr"))
        f.store(f.arguments["count"], Value(f"@{name}_slot_count", "ptr"))


class _Handler:
    def __init__(
        self, module: Module, program: ThreadedProgram, arguments: int, results: int, arena: bool
    ) -> None:
        self.module = module
        self.program = program
        self.arguments = arguments
        self.results = results
        self.arena = arena

    def emit(self) -> None:
        name = f"{self.program.name}_handler"
        with FunctionBuilder(self.module, name, [("frame", "ptr")], result="ptr", plain=True) as f:
            self.f = f
            self.frame = FfiFrame(self.module, f)
            self.frame.begin()
            self._check_count("arg_count", self.arguments, "arguments", spare=1)
            self._check_count("ret_count", self.results, "results")
            if self.program.devices > 1:
                MeshCall(self.frame, self.program).emit(self._run)
                return
            slot = self._take_slot()
            self._run(slot)
            f.atomic_store(constant(0, "i64"), f.offset(slot, SLOT["busy"]))
            f.ret(Value("null", "ptr"))

    def _check_count(self, field: str, count: int, what: str, spare: int = 0) -> None:
        """Refuse a call with another number of buffers than the program takes, spare ones aside."""
        f, actual = self.f, self.frame.count(field)
        message = f"native program {self.program.name} takes {count} {what}, and the call has another number"
        wrong = f.compare("ugt", f.op(f"sub i64 {actual}, {count}", "i64"), constant(spare, "i64"))
        self.frame.fail_if(wrong, f"{self.program.name}_wrong_{field}", message)

    def _take_slot(self) -> Value:
        f, name = self.f, self.program.name
        slots = f.load(Value(f"@{name}_slots", "ptr"), "ptr")
        count = f.load(Value(f"@{name}_slot_count", "ptr"), "i64")
        at = f.stack("i64")
        f.store(constant(0, "i64"), at)
        with f.repeat() as leave_if:
            slot = f.offset(slots, f.imul(f.load(at, "i64"), SLOT_BYTES))
            was_busy = f.atomic_exchange(f.offset(slot, SLOT["busy"]), 1)
            leave_if(f.compare("eq", was_busy, constant(0, "i64")))
            following = f.add(f.load(at, "i64"), constant(1, "i64"))
            wrapped = f.compare("sge", following, count)
            f.store(f.select(wrapped, constant(0, "i64"), following), at)
            with f.when(wrapped):
                f.call("sched_yield", result="i32")
        return f.offset(slots, f.imul(f.load(at, "i64"), SLOT_BYTES))

    def _run(self, slot: Value) -> None:
        f = self.f
        log = f.load(f.offset(slot, SLOT["log"]), "ptr")
        is_timed = f.op(f"icmp ne ptr {log}, null", "i1")
        with f.branch_value(is_timed, constant(0, "i64")) as begin:
            begin.value = emit_now(f)
        self._run_program(slot)
        with f.when(is_timed):
            key = f.load(Value(f"@{self.program.name}_slots", "ptr"), "i64")
            at = f.op(f"sub i64 {f.op(f'ptrtoint ptr {slot} to i64', 'i64')}, {key}", "i64")
            device = f.op(f"udiv i64 {at}, {SLOT_BYTES}", "i64")
            emit_entry(f, log, key=key, device=device, begin=begin.result(), end=emit_now(f))

    def _run_program(self, slot: Value) -> None:
        f, table, entries = self.f, self.f.stack("ptr", self.program.pointers + 2), 0
        for field, count in (("args", self.arguments), ("rets", self.results)):
            for data in self.frame.buffers(field, count):
                f.store(data, table, entries)
                entries += 1
        fields = ([SLOT["arena"]] if self.arena else []) + [SLOT["workspace"], SLOT["barrier"]]
        for offset in fields:
            f.store(f.load(f.offset(slot, offset), "ptr"), table, entries)
            entries += 1
        # The table: the caller's pointers, the arena, the workspaces, the barrier, as the program's entry
        # reads it.
        pool = f.load(f.offset(slot, SLOT["pool"]), "ptr")
        alone = f.op(f"icmp eq ptr {pool}, null", "i1")
        entry = Value(f"@{self.program.name}", "ptr")
        with f.when(alone):
            f.emit(f"call void {entry}(i64 0, i64 1, {table.typed})")
        with f.when(f.not_(alone)):
            f.call(PoolRun().name, pool, entry, table)


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
        # Read before the slot is free: the next launch of this device writes both.
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
