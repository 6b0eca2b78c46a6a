"""When work ran on a GPU: a kernel of one thread that writes the GPU's clock to memory of the host.

It is launched on the stream of the work, before and behind it, so that it takes its place among the kernels,
in a graph too, where events have no time.  Its only argument is the address of a mark:

    mark      the address of a head, and a key
    head      the number of entries, the room for them, and where they are: in memory that the GPU shares
    entry     the key plus one, and nanoseconds of %globaltimer

Kernels of one stream run one after the other, so that the count needs no atomic addition: each GPU has a
head of its own.  The clock of a GPU is not the host's.  It is read between two readings of that, again and
again, before the log is written and behind; the closest pairs say which time of the host is which of the GPU.

The handler of a program launches it twice, before its steps and behind them, if its state has the kernel.
Fragments of XLA are timed by a custom call, as on CPUs (`native_cpu/ffi.py`): it takes a mark and results in
an element that is not written, and XLA starts it on the stream of its device when its other operands are
there.

Source: the PTX ISA, `%globaltimer`; the CUDA driver API, "Memory Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import struct
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.compile.backends.ffi.custom_call import capsule
from mpmd.compile.backends.ffi.frame import FfiFrame, check_version
from mpmd.compile.backends.native_gpu.calls import ENTRIES, NULL, STATE, CallEmitter
from mpmd.compile.backends.native_gpu.cuda_driver import GpuDriver
from mpmd.compile.backends.native_gpu.gpu import GpuLibraries
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries, address
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.llvm.engine import LoadedCode, compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant
from mpmd.support.execution_log import Execution
from mpmd.support.resources import keep_past_exit, once

STAMP_KERNEL = "mpmd_stamp"

PTX = f"""\
.version 7.0
.target sm_75
.address_size 64

.visible .entry {STAMP_KERNEL}(.param .u64 mark)
{{
    .reg .pred %full;
    .reg .b64 %at, %key, %head, %count, %room, %entry, %next, %time;
    ld.param.u64 %at, [mark];
    ld.global.u64 %head, [%at];
    ld.global.u64 %key, [%at+8];
    ld.global.u64 %count, [%head];
    ld.global.u64 %room, [%head+8];
    ld.global.u64 %entry, [%head+16];
    setp.ge.u64 %full, %count, %room;
    @%full bra done;
    add.u64 %next, %count, 1;
    st.global.u64 [%head], %next;
    shl.b64 %count, %count, 4;
    add.u64 %entry, %entry, %count;
    add.u64 %key, %key, 1;
    mov.u64 %time, %globaltimer;
    st.global.v2.u64 [%entry], {{%key, %time}};
done:
    ret;
}}
"""
"""The kernel; the driver compiles it, for any GPU, so that nothing else need be installed."""

PAIRED = 1 << 62
"""In a key: its entries are begin and end in turn."""

_READINGS = 16
_WHAT = "reading the GPU's clock"


@dataclasses.dataclass(frozen=True)
class ClockReading:
    """Nanoseconds of CLOCK_MONOTONIC and of the GPU at one time, up to `error_ns`."""

    host_ns: int
    gpu_ns: int
    error_ns: int


class GpuClock:
    """The clock of one GPU.

    Args:
        driver: of the GPU.

    Attributes:
        driver: the same.
        function: the kernel, loaded; it stays for the life of the process.
    """

    def __init__(self, driver: GpuDriver) -> None:
        self.driver = driver
        self._kept = contextlib.ExitStack()
        driver.enter()
        code = Cubin(STAMP_KERNEL, PTX.encode() + b"\0", PTX, 0, 1, 0)
        self.function = driver.kernel(code, self._kept)

    @functools.cached_property
    def _stream(self) -> int:
        return self.driver.stream(self._kept, _WHAT)

    def read(self) -> ClockReading:
        """The closest of some readings; the GPU should have nothing to do."""
        driver = self.driver
        driver.enter()
        driver.release()  # logs of earlier recordings
        with contextlib.ExitStack() as undo:
            log = _Entries(driver, _READINGS, undo)
            mark = ctypes.c_uint64(driver.memory(struct.pack("2Q", log.head, 0), undo, "marks"))
            pointer = (ctypes.c_void_p * 1)(ctypes.addressof(mark))
            around = []
            for _ in range(_READINGS):
                begin = time.perf_counter_ns()
                given = (1, 1, 1, 1, 1, 1, 0, self._stream, pointer, None)
                driver.call("cuLaunchKernel", self.function, *given, what=_WHAT)
                driver.call("cuStreamSynchronize", self._stream, what=_WHAT)
                around.append((begin, time.perf_counter_ns()))
            return min(
                (
                    ClockReading((begin + end) // 2, gpu, (end - begin + 1) // 2)
                    for (begin, end), (_, gpu) in zip(around, log.written(), strict=True)
                ),
                key=lambda reading: reading.error_ns,
            )


@once
def clock_at(libraries: GpuLibraries, ordinal: int) -> GpuClock:
    """The clock of a GPU, of any kind; once it was found it stays.

    Raises:
        CompileError: there is no driver, it is too old, or a call of it failed.
    """
    return GpuClock(GpuDriver(libraries.driver, ordinal))


class _Entries:
    def __init__(self, driver: GpuDriver, room: int, undo: contextlib.ExitStack) -> None:
        self._words, there = driver.mapped(16 * room, undo)
        self.head = driver.memory(struct.pack("3Q", 0, room, there), undo, "marks")

    def written(self) -> Iterator[tuple[int, int]]:
        """The key and the time of each entry, in order."""
        words = iter(self._words)
        for key in words:
            if not key:
                return
            yield key - 1, next(words)


class GpuLog:
    """The log of a recording on some GPUs; see `TimeLog`.

    Args:
        clocks: of the GPUs, by ordinal.
        room: for how many entries of each.

    Attributes:
        error_s: how well the clocks are known, in seconds; of the readings so far.
    """

    def __init__(self, clocks: Mapping[int, GpuClock], room: int) -> None:
        self._clocks, self._entries = clocks, dict[int, _Entries]()
        self._before = {ordinal: clock.read() for ordinal, clock in clocks.items()}
        for ordinal, clock in clocks.items():
            undo = contextlib.ExitStack()
            weakref.finalize(self, clock.driver.leave, undo).atexit = False
            clock.driver.enter()
            self._entries[ordinal] = _Entries(clock.driver, room, undo)
        self.error_s = self._worst(self._before)

    def address_of(self, ordinal: int) -> int:
        return self._entries[ordinal].head

    def entries(self) -> tuple[Execution, ...]:
        """Every entry, by GPU and in its order, in seconds of the host; all work must have ended."""
        after = {ordinal: clock.read() for ordinal, clock in self._clocks.items()}
        self.error_s = max(self.error_s, self._worst(after))
        executions = []
        for ordinal, entries in self._entries.items():
            seconds = functools.partial(host_seconds, self._before[ordinal], after[ordinal])
            begun: dict[int, float] = {}
            for key, ticks in entries.written():
                begin = end = seconds(ticks)
                if key & PAIRED:
                    if key not in begun:
                        begun[key] = begin
                        continue
                    begin = begun.pop(key)
                executions.append(Execution(key & ~PAIRED, ordinal, begin, end))
        return tuple(executions)

    def _worst(self, readings: Mapping[int, ClockReading]) -> float:
        return max((reading.error_ns * 1e-9 for reading in readings.values()), default=0.0)


def host_seconds(before: ClockReading, after: ClockReading, gpu_ns: int) -> float:
    """The time of the host, in seconds, when the GPU's clock showed some nanoseconds.

    Between two readings that are close together, the offset of the first is as good as any rate.
    """
    passed = gpu_ns - before.gpu_ns
    of_gpu, of_host = after.gpu_ns - before.gpu_ns, after.host_ns - before.host_ns
    drift = of_host - of_gpu
    if of_gpu > 0 and abs(drift) > before.error_ns + after.error_ns:
        passed += round(drift * passed / of_gpu)
    return (before.host_ns + passed) * 1e-9


_STREAM_GET_BYTES = 32
_numbers = itertools.count()


def emit_stamp(calls: CallEmitter, f: FunctionBuilder, stream: Value, mark: Value) -> None:
    """Launches the kernel of the state block with a mark."""
    value, pointer = f.stack("ptr"), f.stack("ptr")
    f.store(mark, value)
    f.store(value, pointer)
    sizes = [constant(1, "i32")] * 6
    given = [calls.word(f, "stamp"), *sizes, constant(0, "i32"), stream, pointer, NULL]
    calls.call(f, "cuLaunchKernel", given, "the stamp of a time")


def emit_stamp_if_recorded(calls: CallEmitter, f: FunctionBuilder, stream: Value) -> None:
    """The same, with the mark of the state block; nothing while no log is written."""
    recorded = f.op(f"icmp ne ptr {calls.word(f, 'stamp')}, null", "i1")
    with f.when(recorded):
        emit_stamp(calls, f, stream, calls.word(f, "mark"))


class GpuStamps:
    """Writes times on GPUs; a `StampSource`.

    Args:
        libraries: the driver's functions.

    Raises:
        CompileError: this jaxlib's FFI has another layout.
    """

    ordered_apart = False

    def __init__(self, libraries: GpuLibraries | None = None) -> None:
        check_version()
        self._libraries = libraries or CudaLibraries()

    def target(self, device: Any) -> str:
        """The custom call of a device.

        Raises:
            CompileError: there is no driver, it is too old, or a call of it failed.
        """
        return _registered(self._libraries, _ordinal(device))[0]

    def log(self, devices: Sequence[Any], room: int) -> GpuLog:
        return GpuLog({n: clock_at(self._libraries, n) for n in map(_ordinal, devices)}, room)


def _ordinal(device: Any) -> int:
    """The number of a GPU among those that this process sees."""
    return max(0, getattr(device, "local_hardware_id", None) or 0)


@once
def _registered(libraries: GpuLibraries, ordinal: int) -> tuple[str, LoadedCode, Any]:
    """Makes the stamp of a GPU known to XLA; its target, and what stays: its code and the table."""
    clock = clock_at(libraries, ordinal)
    driver = clock.driver
    module = Module(host_target())
    calls = CallEmitter(module, "stamp")
    with FunctionBuilder(module, "stamp_state", [], result="ptr") as f:
        f.ret(calls.state)
    with FunctionBuilder(module, "stamp_handler", [("frame", "ptr")], result="ptr", plain=True) as f:
        frame = FfiFrame(module, f)
        frame.begin()
        (mark,) = frame.buffers("args", 1)
        stream = frame.ask("stream_get", _STREAM_GET_BYTES, "ptr")
        calls.call(f, "cuCtxSetCurrent", [calls.word(f, "context")], "the stamp of a time")
        emit_stamp(calls, f, stream, mark)
        f.ret(NULL)
    code = compile_module(module, ["stamp_state", "stamp_handler"])
    names = [name for name in ENTRIES if not name.startswith("cublasLt")]
    table = np.array([address(driver.function(name)) for name in names] + [0] * 2, np.uint64)
    words = code.function("stamp_state", result=ctypes.c_void_p)()
    state = (ctypes.c_int64 * len(STATE)).from_address(words)
    filled = {"table": table.ctypes.data, "context": driver.context, "stamp": clock.function}
    state[:] = [filled.get(word, 0) for word in STATE]
    for used in (code, table):
        keep_past_exit(used)
    target = f"mpmd.stamp.{next(_numbers)}"
    handler = capsule(libraries.entry(code.address("stamp_handler")))
    jax.ffi.register_ffi_target(target, handler, platform=libraries.platform)
    return target, code, table
