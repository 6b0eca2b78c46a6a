"""Calls through the table of functions, in LLVM IR: another status than 0 ends the caller with an error.

Source: xla/ffi/api/c_api.h for the error; cuda.h and cublasLt.h for the functions that name a status.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.backends.ffi.frame import FfiFrame
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.module import Module
from mpmd.compile.llvm.types import Value, constant

ENTRIES = (
    "cuCtxSetCurrent",
    "cuLaunchKernel",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD32Async",
    "cuMemcpyDtoHAsync_v2",
    "cuStreamSynchronize",
    "cuGetErrorName",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphDestroy",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cublasLtMatmul",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtGetStatusName",
)
"""The functions that a handler calls, in the order of its table; without products the last three are null."""

STATE = (
    "table", "kernels", "products", "context", "constants", "graphs", "capturing", "device", "stamp", "mark",
    "failed_status", "multiplying",
)  # fmt: skip
"""The words of the state block; the handler writes the last two alone, and `multiplying` is a lock.
`graphs` is null or a block as in `capture.py`, `capturing` the stream on which that captures, `device` the
GPU's number in its mesh; `stamp` is null or the kernel of `clock.py`, and `mark` its argument."""

_MESSAGE_BYTES = 512
NULL = Value("null", "ptr")


class CallEmitter:
    """The calls of the functions of one program.

    Args:
        module: their module; it gets a function that turns a status into an error.
        name: of the program.
    """

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        module.add_global(f"{name}_words", f"internal global [{len(STATE)} x i64] zeroinitializer")
        self.state = Value(f"@{name}_words", "ptr")
        self._texts: dict[str, str] = {}
        self._calls = 0
        self._emit_failure()

    def function(self, what: str, *arguments: str) -> FunctionBuilder:
        """`<name>_<what>`, a function of pointers, first the frame; it returns an error or null."""
        given = [(argument, "ptr") for argument in ("frame", *arguments)]
        return FunctionBuilder(
            self.module, f"{self.name}_{what}", given, result="ptr", internal=True, plain=True
        )

    def word(self, f: FunctionBuilder, which: str) -> Value:
        return f.load(self.state, "ptr", STATE.index(which))

    def call(self, f: FunctionBuilder, entry: str, values: Sequence[Value], where: str) -> None:
        """Calls an entry of the table; another status than 0 ends the function with an error."""
        status = self.enter(f, entry, values)
        self.fail_if_not_zero(f, status, entry, where)

    def enter(self, f: FunctionBuilder, entry: str, values: Sequence[Value], result: str = "i32") -> Value:
        function = f.load(self.word(f, "table"), "ptr", ENTRIES.index(entry))
        return f.op(f"call {result} {function}({', '.join(value.typed for value in values)})", result)

    def fail_if_not_zero(self, f: FunctionBuilder, status: Value, entry: str, where: str) -> None:
        """Ends the function with an error that names the call, unless its status is 0."""
        text = self._text(f, f"GPU program {self.name}: {entry} failed in {where}")
        library = constant(int(entry.startswith("cublasLt")), "i1")
        given = ", ".join(v.typed for v in (f.arguments["frame"], text, status, library))
        self._calls += 1
        error = Value(f"%error{self._calls}", "ptr")
        with f.when(f.compare("ne", status, constant(0, "i32")), returns=True, value=error):
            f.emit(f"{error} = call ptr @{self.name}_failure({given})")

    def _text(self, f: FunctionBuilder, message: str) -> Value:
        """The address of a message; equal ones are in the module once."""
        symbol = self._texts.setdefault(message, f"{self.name}_message{len(self._texts)}")
        return FfiFrame(self.module, f).text(symbol, message)

    def _emit_failure(self) -> None:
        """`failure(frame, text, status, library)`: an error with the text and the status in words."""
        arguments = [("frame", "ptr"), ("text", "ptr"), ("status", "i32"), ("library", "i1")]
        symbol = f"{self.name}_failure"
        with FunctionBuilder(self.module, symbol, arguments, result="ptr", internal=True, plain=True) as f:
            status, of_library, name = f.arguments["status"], f.arguments["library"], f.stack("ptr")
            f.store(f.cast("sext", status, "i64"), self.state, STATE.index("failed_status"))
            f.store(NULL, name)
            with f.when(of_library):
                f.store(self.enter(f, "cublasLtGetStatusName", [status], "ptr"), name)
            with f.when(f.op(f"xor {of_library.typed}, true", "i1")):
                self.enter(f, "cuGetErrorName", [status, name])
            words, format_ = f.load(name, "ptr"), self._text(f, "%s: %s (status %d)")
            unknown = f.op(f"icmp eq ptr {words}, null", "i1")
            words = f.select(unknown, self._text(f, "unknown error"), words)
            message, size = f.stack("i8", _MESSAGE_BYTES), constant(_MESSAGE_BYTES, "i64")
            given = [message, size, format_, f.arguments["text"], words, status]
            self.module.declare("snprintf", "i32", ("ptr", "i64", "ptr", "..."))
            listed = ", ".join(value.typed for value in given)
            f.op(f"call i32 (ptr, i64, ptr, ...) @snprintf({listed})", "i32")
            f.ret(FfiFrame(self.module, f).error(message))
