"""Entering JAX: a native program as one XLA custom call, with the memory and threads that its handler finds.

Arrays, donation and asynchronous dispatch stay JAX's own.  The arena is ours and is kept: memory that is
touched for the first time in every call would cost more than many a kernel.  It starts at a cache line, or,
if it is large, at a huge page.

Fragments of XLA are timed by *stamps*: custom calls that only write when they run.  XLA runs the programs of
a device in the order in which a thread starts them, each when its arguments are there.  A stamp that takes
the arguments of a fragment therefore records when it could begin, and one that takes its results when it
had ended; unlike a thread that waits for results, it runs where the fragment ran.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mpmd.brief import brief
from mpmd.compile.backends.ffi.custom_call import ATTRIBUTE, TARGET_NAME, LoadedPrograms, ProgramLoad, capsule
from mpmd.compile.backends.ffi.frame import FfiFrame, check_version, emit_entry, emit_now
from mpmd.compile.backends.native_cpu.barrier import (
    BACK_OFF_LIMIT,
    DEVICE_AT,
    DEVICES,
    MAX_BACK_OFFS,
    MEETING_BYTES,
    MESH_AT,
)
from mpmd.compile.backends.native_cpu.handler import SLOT, SLOT_BYTES
from mpmd.compile.backends.native_cpu.loading import CompiledProgram
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.cache import DiskCache
from mpmd.compile.llvm.cpu import LINE_BYTES, CpuTarget, host_target
from mpmd.compile.llvm.engine import LoadedCode, compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant
from mpmd.errors import CompileError
from mpmd.support.execution_log import ExecutionLog
from mpmd.support.resources import keep_past_exit, once

_ALIGNMENT = 64
_HUGE = 2 << 20  # bytes of a huge page
_WORTH_HUGE = 1 << 20  # bytes that a huge page must hold, lest most of it be wasted


def aligned_empty(shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
    """An uninitialised array whose memory starts at a cache line, as XLA's buffers do."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def program_memory(size: int) -> np.ndarray:
    """Uninitialised bytes that a program keeps: a workspace or an arena.

    Large ones start at a huge page and ask the system for huge pages where it has them, so that kernels read
    and fetch without a search for each page of 4 KB.

    Raises:
        MemoryError: there is not so much memory.
    """
    if size < _WORTH_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_empty((size,), np.uint8)
    pages, rest = divmod(size, _HUGE)
    pages += rest >= _WORTH_HUGE
    try:  # more than is touched: the rest takes addresses alone
        memory = mmap.mmap(-1, size + 2 * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for {size:,} bytes: {error}") from error
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE
    with contextlib.suppress(OSError):  # advice that the system does not take
        memory.madvise(mmap.MADV_HUGEPAGE, start, pages * _HUGE)
    return raw[start : start + size]


@dataclass(frozen=True)
class RegisteredProgram:
    """A program that XLA knows as a custom call target.

    Attributes:
        index: which of the loaded programs it is.
        compiled: the program.
        slots: how many calls can run at the same time.
        memory: the slots.
        kept_bytes: what it keeps from call to call: arenas and workspaces of all slots.
    """

    index: int
    compiled: CompiledProgram
    slots: int
    memory: np.ndarray = field(repr=False, compare=False)
    kept_bytes: int = 0

    __repr__ = brief

    @property
    def key(self) -> int:
        return int(self.memory.ctypes.data)

    def write_to(self, log: ExecutionLog | None) -> None:
        """Writes to a log, from the next call on, when it runs; to none if it is None."""
        for slot in range(self.slots):
            self.memory[(slot * SLOT_BYTES + SLOT["log"]) // 8] = 0 if log is None else log.address

    def __call__(
        self,
        *arguments: Any,
        results: Sequence[jax.ShapeDtypeStruct],
        aliases: Mapping[int, int] | None = None,
        large: bool = False,
        after: Any = None,
    ) -> Any:
        """The custom call, inside of traced code; see `LoadedProgram`."""
        if after is not None or large:  # the handler takes one operand that it does not read
            arguments = (*arguments, _ballast() if after is None else after)
        call = jax.ffi.ffi_call(
            TARGET_NAME, list(results), input_output_aliases=dict(aliases or {}), has_side_effect=False
        )
        return call(*arguments, **{ATTRIBUTE: np.int64(self.index)})


# XLA on CPU counts the operations of a program (a custom call has none) and runs one with fewer than a
# thousand in the thread that calls it, in which nothing else is issued meanwhile.
_BALLAST = (8, 16)


def _ballast() -> Any:
    """An operand that costs less than a microsecond and counts as work: a product of two small constants.

    Products are calls of a library, so that XLA has no code to generate.  The numbers have no pattern, or XLA
    would generate an iota or a splat; the barrier keeps the product from being folded.
    """
    rows, columns = _BALLAST
    numbers = np.sin(np.arange(rows * columns, dtype=np.float32)).reshape(_BALLAST)
    hidden = jax.lax.optimization_barrier(numbers)
    return jax.lax.dot(hidden, numbers.reshape(columns, rows))


_PROGRAMS: LoadedPrograms[RegisteredProgram] = LoadedPrograms()


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
) -> RegisteredProgram:
    """Make a program callable from JAX; the same program and instance twice is the same target.

    Args:
        compiled: what `compile_with_handler` returned.
        target: the CPU it was compiled for.
        arena_bytes: size of the program's temporary memory.
        constants: bytes at the beginning of the arena, which stay.
        instance: whose memory and threads these are, for instance a mesh's name.
        slots: how many calls may run at the same time, each with an arena.
        pools: threads of each slot; without one the calling thread works alone.
        cache: where functions that programs share are kept, if they are.
        devices: the numbers, in XLA, of the devices that run it together, in the order of the mesh; each
            has a slot.

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

    def load() -> ProgramLoad[RegisteredProgram]:
        code = compiled.load(target, cache)
        try:
            memory, kept = _slots(compiled, arena_bytes, constants, slots, pools)
        except (MemoryError, ValueError) as error:  # NumPy's words for too many bytes
            raise CompileError(
                f"native program {compiled.name} needs {arena_bytes / 2**30:.1f} GiB of temporary memory, "
                f"which this process does not get: {error}\n"
                "Use smaller microbatches, more stages or rematerialisation."
            ) from error
        kept_bytes = sum(arena.nbytes + workspace.nbytes for arena, workspace, _, _ in kept)
        if len(devices) > 1:
            kept.append(_join(compiled, memory, kept, devices))
        bind = code.function(f"{compiled.name}_bind", ctypes.c_void_p, ctypes.c_int64)
        bind(memory.ctypes.data, slots)

        def program(index: int) -> RegisteredProgram:
            return RegisteredProgram(index, compiled, slots, memory, kept_bytes)

        return ProgramLoad(code.address(f"{compiled.name}_handler"), program, (code, memory, kept))

    return _PROGRAMS.named(name, load)


def _slots(
    compiled: CompiledProgram, arena_bytes: int, constants: bytes, slots: int, pools: Sequence[WorkerPool]
) -> tuple[np.ndarray, list[Any]]:
    memory = aligned_empty((slots * (SLOT_BYTES + 8) // 8,), np.int64)
    memory[:] = 0
    kept: list[Any] = []
    for number in range(slots):
        pool = pools[number % len(pools)] if pools else None
        threads = pool.threads if pool else 1
        arena = program_memory(max(LINE_BYTES, arena_bytes))
        arena[: len(constants)] = np.frombuffer(constants, np.uint8)
        workspace = program_memory(max(LINE_BYTES, threads * compiled.workspace_bytes))
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
    compiled: CompiledProgram, memory: np.ndarray, kept: list[Any], devices: Sequence[int]
) -> np.ndarray:
    """Write each device's number and the address of the mesh's memory; returns that memory."""
    memory[len(devices) * SLOT_BYTES // 8 :] = devices
    size = compiled.mesh.bytes if compiled.mesh is not None else 0
    mesh = aligned_empty((max(LINE_BYTES, size),), np.uint8)
    mesh[:] = 0
    mesh[DEVICES : DEVICES + 8].view(np.int64)[0] = len(devices)
    mesh[BACK_OFF_LIMIT : BACK_OFF_LIMIT + 8].view(np.int64)[0] = MAX_BACK_OFFS
    for number, (_, _, barrier, _) in enumerate(kept):
        barrier[MESH_AT : MESH_AT + 8].view(np.int64)[0] = mesh.ctypes.data
        barrier[DEVICE_AT : DEVICE_AT + 8].view(np.int64)[0] = number
    return mesh


STAMP = "mpmd.stamp"
"""The custom call's target.  It takes `u64[2]`, the address of a log and a key, and results in `s8[]`."""


class HostStamps:
    """Writes times on CPU devices; a `StampSource`."""

    ordered_apart = True

    def target(self, device: Any) -> str:
        return register_stamp()[0]

    def log(self, devices: Sequence[Any], room: int) -> ExecutionLog:
        return ExecutionLog(len(devices) * room)


@once
def register_stamp() -> tuple[str, LoadedCode]:
    """Makes the stamp known to XLA, once per process; its target, and its code, which stays.

    Raises:
        CompileError: this jaxlib's FFI has another layout.
    """
    check_version()
    module = Module(host_target())
    with FunctionBuilder(module, "stamp", [("frame", "ptr")], result="ptr", plain=True) as f:
        frame = FfiFrame(module, f)
        frame.begin()
        (given,) = frame.buffers("args", 1)
        (result,) = frame.buffers("rets", 1)
        device = frame.device()
        f.store(constant(0, "i8"), result)
        now = emit_now(f)
        log = f.load(given, "ptr")
        emit_entry(f, log, key=f.load(given, "i64", 1), device=device, begin=now, end=now)
        f.ret(Value("null", "ptr"))
    code = compile_module(module, ["stamp"])
    keep_past_exit(code)
    handler: Any = capsule(code.address("stamp"))
    jax.ffi.register_ffi_target(STAMP, handler, platform="cpu")
    return STAMP, code
