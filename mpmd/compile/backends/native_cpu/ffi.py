"""Entering JAX: a native program as one XLA custom call, its handler emitted as LLVM IR.

    XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame)

reads the data pointers of all arguments and results, takes a free slot (arena, workspaces, threads), runs the
program, and frees the slot.  On a mesh of several devices XLA calls it once per device, each on a thread of
its own; every device has a slot, and devices that exchange data meet before they begin.  Arrays, donation and
asynchronous dispatch stay JAX's own.  The arena is ours and is kept: memory that is touched for the first
time in every call would cost more than many a kernel.

Source: xla/ffi/api/c_api.h, which jaxlib ships; offsets below are of API version 0.3, and later versions of
    the same
major number only add fields at the ends of structs.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpmd.compile.backends.native_cpu.compiled_program import CompiledProgram, compile_program
from mpmd.compile.backends.native_cpu.direct import aligned_empty, program_memory
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.engine import LoadedCode
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant
from mpmd.compile.backends.native_cpu.meeting import (
    DEVICE_AT,
    DEVICES,
    MEETING_BYTES,
    MESH_AT,
    PATIENCE,
    PATIENCE_NAPS,
)
from mpmd.compile.backends.native_cpu.mesh_call import SLOT, SLOT_BYTES, MeshCall
from mpmd.compile.backends.native_cpu.overrides import Override
from mpmd.compile.backends.native_cpu.program import Program
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.backends.native_cpu.threads import PoolRun, WorkerPool
from mpmd.compile.cache import DiskCache
from mpmd.errors import CompileError

API_MAJOR, API_MINOR = 0, 3

# offsets in bytes
FRAME = {"extension": 8, "api": 16, "stage": 32, "arg_count": 56, "args": 72, "ret_count": 96, "rets": 112}
BUFFER_DATA = 24
EXTENSION = {"type": 8, "metadata": 24}
METADATA = {"major": 24, "minor": 28, "traits": 32}
API = {"error_create": 48, "run_id": 176, "device_ordinal": 184}
_METADATA_EXTENSION, _EXECUTE_STAGE, _FAILED_PRECONDITION = 1, 3, 9


@lru_cache(maxsize=1)
def check_version() -> None:
    """Refuse a jaxlib whose interface has another layout.

    Raises:
        CompileError: the major version of XLA's FFI differs, or its minor version is too old.
    """
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text())
    version = {part: int(number) for part, number in found}
    if version.get("MAJOR") != API_MAJOR or version.get("MINOR", 0) < API_MINOR:
        raise CompileError(
            f"this jaxlib has XLA FFI version {version.get('MAJOR')}.{version.get('MINOR')}; "
            f"native code needs {API_MAJOR}.{API_MINOR} or a later minor version.\n"
            "Use the `xla` backend, or a jaxlib that fits."
        )


def compile_with_handler(
    program: Program,
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
    """Emission of one handler."""

    def __init__(self, module: Module, program: Program, arguments: int, results: int, arena: bool) -> None:
        self.module = module
        self.program = program
        self.arguments = arguments
        self.results = results
        self.arena = arena

    def emit(self) -> None:
        name = f"{self.program.name}_handler"
        with FunctionBuilder(self.module, name, [("frame", "ptr")], result="ptr", plain=True) as f:
            self.f = f
            self.frame = f.arguments["frame"]
            self._answer_metadata()
            stage = f.load(f.offset(self.frame, FRAME["stage"]), "i32")
            self._return_if(f.compare("ne", stage, constant(_EXECUTE_STAGE, "i32")))
            self._check_count("arg_count", self.arguments, "arguments", spare=1)
            self._check_count("ret_count", self.results, "results")
            if self.program.devices > 1:
                MeshCall(f, self.frame, self.program, self._service, self._error).emit(self._run)
                return
            slot = self._take_slot()
            self._run(slot)
            f.atomic_store(constant(0, "i64"), f.offset(slot, SLOT["busy"]))
            f.ret(Value("null", "ptr"))

    def _return_if(self, condition: Value) -> None:
        self._return_error(condition, Value("null", "ptr"))

    def _return_error(self, condition: Value, error: Value) -> None:
        with self.f.when(condition, returns=True, value=error):
            pass

    def _answer_metadata(self) -> None:
        """When it registers a handler XLA calls it with an extension that asks for the version."""
        f = self.f
        extension = f.load(f.offset(self.frame, FRAME["extension"]), "ptr")
        with f.when(f.op(f"icmp ne ptr {extension}, null", "i1")):
            kind = f.load(f.offset(extension, EXTENSION["type"]), "i32")
            asked = f.compare("eq", kind, constant(_METADATA_EXTENSION, "i32"))
            with f.when(asked, returns=True, value=Value("null", "ptr")):
                metadata = f.load(f.offset(extension, EXTENSION["metadata"]), "ptr")
                answers = (("major", API_MAJOR), ("minor", API_MINOR), ("traits", 0))
                for field, value in answers:
                    f.store(constant(value, "i32"), f.offset(metadata, METADATA[field]))

    def _check_count(self, field: str, count: int, what: str, spare: int = 0) -> None:
        """Refuse a call with another number of buffers than the program takes, spare ones aside."""
        f = self.f
        found = f.load(f.offset(self.frame, FRAME[field]), "i64")
        message = f"native program {self.program.name} takes {count} {what}, and the call has another number"
        wrong = f.compare("ugt", f.op(f"sub i64 {found}, {count}", "i64"), constant(spare, "i64"))
        with f.branch_value(wrong, Value("null", "ptr")) as branch:
            branch.value = self._error(f"{self.program.name}_wrong_{field}", message)
        self._return_error(wrong, branch.result())

    def _error(self, symbol: str, message: str) -> Value:
        """A new XLA_FFI_Error."""
        f = self.f
        text = message.encode()
        escaped = "".join(chr(c) if 32 <= c < 127 and chr(c) not in '"\\' else f"\\{c:02X}" for c in text)
        self.module.add_global(symbol, f'internal constant [{len(text) + 1} x i8] c"{escaped}\\00"')
        request = f.stack("i64", 4)
        f.store(constant(28, "i64"), request)  # size of the struct up to its last field
        f.store(Value("null", "ptr"), request, 1)
        f.store(Value(f"@{symbol}", "ptr"), request, 2)
        f.store(constant(_FAILED_PRECONDITION, "i32"), f.offset(request, 24))
        return f.op(f"call ptr {self._service('error_create')}(ptr {request})", "ptr")

    def _service(self, name: str) -> Value:
        """A function of XLA's."""
        api = self.f.load(self.f.offset(self.frame, FRAME["api"]), "ptr")
        return self.f.load(self.f.offset(api, API[name]), "ptr")

    def _take_slot(self) -> Value:
        """The first free slot, waiting for one if all are taken."""
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
        """Fill the table and run the program on the slot's threads."""
        f, table, entries = self.f, self.f.stack("ptr", self.program.pointers + 2), 0
        for field, count in (("args", self.arguments), ("rets", self.results)):
            buffers = f.load(f.offset(self.frame, FRAME[field]), "ptr")
            for number in range(count):
                buffer = f.load(buffers, "ptr", number)
                f.store(f.load(f.offset(buffer, BUFFER_DATA), "ptr"), table, entries)
                entries += 1
        fields = ([SLOT["arena"]] if self.arena else []) + [SLOT["workspace"], SLOT["barrier"]]
        for offset in fields:
            f.store(f.load(f.offset(slot, offset), "ptr"), table, entries)
            entries += 1
        pool = f.load(f.offset(slot, SLOT["pool"]), "ptr")
        alone = f.op(f"icmp eq ptr {pool}, null", "i1")
        entry = Value(f"@{self.program.name}", "ptr")
        with f.when(alone):
            f.emit(f"call void {entry}(i64 0, i64 1, {table.typed})")
        with f.when(f.not_(alone)):
            f.call(PoolRun().name, pool, entry, table)


@dataclass(frozen=True)
class RegisteredProgram:
    """A program that XLA knows as a custom call target.

    Attributes:
        target_name: the custom call's target.
        compiled: the program.
        slots: how many calls can run at the same time.
    """

    target_name: str
    compiled: CompiledProgram
    slots: int

    def __call__(
        self,
        *arguments: Any,
        results: Sequence[jax.ShapeDtypeStruct],
        aliases: Mapping[int, int] | None = None,
        large: bool = False,
    ) -> Any:
        """The custom call, inside of traced code.

        Args:
            *arguments: arrays.
            results: shapes and dtypes of the results.
            aliases: argument → result that shares its memory if it is donated.
            large: whether it is so much work that the caller should not wait for it.
        """
        if large:
            arguments = (*arguments, _ballast())
        call = jax.ffi.ffi_call(
            self.target_name, list(results), input_output_aliases=dict(aliases or {}), has_side_effect=False
        )
        return call(*arguments)


# XLA on CPU counts the operations of a program, those of custom calls as none, and runs one with fewer than a
# thousand in the thread that calls it, in which nothing else is issued meanwhile.
_BALLAST = (8, 16)


def _ballast() -> Any:
    """An operand that costs less than a microsecond and counts as work: a product of two small constants.

    Products are calls of a library, so that XLA has no code to generate; the numbers are no pattern that it
    would make an iota or a splat, which are code, and the barrier stands until constants have been folded.
    """
    rows, columns = _BALLAST
    numbers = np.sin(np.arange(rows * columns, dtype=np.float32)).reshape(_BALLAST)
    hidden = jax.lax.optimization_barrier(numbers)
    return jax.lax.dot(hidden, numbers.reshape(columns, rows))


# Target names are global and final: code, memory and threads of each live as long as the process.
_REGISTERED: dict[str, tuple[RegisteredProgram, LoadedCode, list[Any]]] = {}
_LOCK = threading.Lock()


def register(
    compiled: CompiledProgram,
    target: CpuTarget,
    *,
    arena_bytes: int = 0,
    constants: bytes = b"",
    instance: str = "",
    slots: int = 1,
    pools: Sequence[WorkerPool] = (),
    cache: DiskCache | None = None,
    devices: Sequence[int] = (0,),
    patience: int = PATIENCE_NAPS,
) -> RegisteredProgram:
    """Make a program callable from JAX; the same program and instance twice is the same target.

    Args:
        compiled: what `compile_with_handler` returned.
        target: the CPU it was compiled for.
        arena_bytes: size of the program's temporary memory.
        constants: what the arena begins with and keeps.
        instance: whose memory and threads these are, for instance a mesh's name.
        slots: how many calls may run at the same time, each with an arena.
        pools: threads of each slot; without one the calling thread works alone.
        cache: where functions that programs share are kept, if they are.
        devices: the numbers, in XLA, of the devices that run it together, in the order of the mesh; each
            has a slot.
        patience: naps for which a device waits for the others.

    Raises:
        CompileError: the code does not load, there is not so much memory, this jaxlib's interface has another
            layout, or the program is one of another number of devices.
    """
    check_version()
    if len(devices) != compiled.devices:
        raise CompileError(
            f"program {compiled.name} runs on {compiled.devices} devices; it was given {len(devices)}"
        )
    name = f"mpmd.{compiled.fingerprint}" + (f".{instance}" if instance else "")
    if len(devices) > 1:
        name += f".{'_'.join(map(str, devices))}"
        slots = len(devices)
    with _LOCK:
        if name in _REGISTERED:
            return _REGISTERED[name][0]
        code = compiled.load(target, cache)
        try:
            memory, kept = _slots(compiled, arena_bytes, constants, slots, pools)
        except (MemoryError, ValueError) as error:  # NumPy's words for too many bytes
            raise CompileError(
                f"native program {compiled.name} needs {arena_bytes / 2**30:.1f} GiB of temporary memory, "
                f"which this process does not get: {error}\n"
                "Use smaller microbatches, more stages or rematerialisation."
            ) from error
        if len(devices) > 1:
            kept.append(_join(compiled, memory, kept, devices, patience))
        bind = code.function(f"{compiled.name}_bind", ctypes.c_void_p, ctypes.c_int64)
        bind(memory.ctypes.data, slots)
        program = RegisteredProgram(name, compiled, slots)
        _REGISTERED[name] = (program, code, [memory, kept])
        jax.ffi.register_ffi_target(name, _capsule(code.address(f"{compiled.name}_handler")), platform="cpu")
        return program


def _slots(
    compiled: CompiledProgram, arena_bytes: int, constants: bytes, slots: int, pools: Sequence[WorkerPool]
) -> tuple[np.ndarray, list[Any]]:
    """The slots' memory, and everything that it points to."""
    memory = aligned_empty((slots * (SLOT_BYTES + 8) // 8,), np.int64)
    memory[:] = 0
    kept: list[Any] = []
    for number in range(slots):
        pool = pools[number % len(pools)] if pools else None
        threads = pool.threads if pool else 1
        arena = program_memory(max(64, arena_bytes))
        arena[: len(constants)] = np.frombuffer(constants, np.uint8)
        workspace = program_memory(max(64, threads * compiled.workspace_bytes))
        barrier = aligned_empty((MEETING_BYTES,), np.uint8)
        barrier[:] = 0
        kept.append((arena, workspace, barrier, pool))
        fields = {
            SLOT["arena"]: arena.ctypes.data,
            SLOT["workspace"]: workspace.ctypes.data,
            SLOT["barrier"]: barrier.ctypes.data,
        }
        if pool is not None and threads > 1:
            fields[SLOT["pool"]] = pool.address
        for offset, address in fields.items():
            memory[(number * SLOT_BYTES + offset) // 8] = address
    return memory, kept


def _join(
    compiled: CompiledProgram, memory: np.ndarray, kept: list[Any], devices: Sequence[int], patience: int
) -> np.ndarray:
    """Tell each device its number and where it meets the others; returns the memory in which they meet."""
    memory[len(devices) * SLOT_BYTES // 8 :] = devices
    mesh = aligned_empty((max(64, compiled.mesh.bytes if compiled.mesh is not None else 0),), np.uint8)
    mesh[:] = 0
    mesh[DEVICES : DEVICES + 8].view(np.int64)[0] = len(devices)
    mesh[PATIENCE : PATIENCE + 8].view(np.int64)[0] = patience
    for number, (_, _, barrier, _) in enumerate(kept):
        barrier[MESH_AT : MESH_AT + 8].view(np.int64)[0] = mesh.ctypes.data
        barrier[DEVICE_AT : DEVICE_AT + 8].view(np.int64)[0] = number
    return mesh


def _capsule(address: int) -> Any:
    create = ctypes.pythonapi.PyCapsule_New
    create.restype, create.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return create(address, None, None)
