"""The stamp: a custom call that only writes when it runs, by which fragments that are not native are timed.

XLA runs the programs of a device in the order in which a thread starts them, each when its arguments are
there.  A stamp of what a fragment reads therefore says when it could begin, and one of its results when it
had ended; unlike a thread that waits for results, it runs where the fragment ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mpmd.compile.backends.ffi.custom_call import capsule
from mpmd.compile.backends.ffi.frame import FfiFrame, check_version, emit_entry, emit_now
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.llvm.engine import LoadedCode, compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant
from mpmd.support.execution_log import ExecutionLog
from mpmd.support.memoisation import once
from mpmd.support.resources import keep_past_exit

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
