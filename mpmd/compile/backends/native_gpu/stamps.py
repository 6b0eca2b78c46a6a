"""Stamps on GPUs: launches of the kernel of `clock.py`, by the handlers of programs and by a call of its own.

The handler of a program has two launches, before its steps and behind them, if its state has the kernel.  The
call of its own takes a mark and results in an element that is not written: XLA starts it on the stream of its
device when its other operands are there; see `native_cpu/stamp.py`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpmd.compile.backends.ffi.custom_call import capsule
from mpmd.compile.backends.ffi.frame import FfiFrame, check_version
from mpmd.compile.backends.native_gpu.calls import ENTRIES, NULL, STATE, CallEmitter
from mpmd.compile.backends.native_gpu.clock import GpuLog, clock_at
from mpmd.compile.backends.native_gpu.functions import address
from mpmd.compile.backends.native_gpu.gpu import GpuLibraries
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.engine import LoadedCode, compile_module
from mpmd.compile.llvm.module import Module
from mpmd.compile.llvm.target import host_target
from mpmd.compile.llvm.types import Value, constant
from mpmd.support.garbage import keep_past_exit
from mpmd.support.memoisation import once

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
