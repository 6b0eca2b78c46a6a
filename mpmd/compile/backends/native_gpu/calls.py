"""What handlers call: functions of a table whose status is checked, and a program as a CUDA graph.

A status that is not 0 ends the caller with an error that names the call.

Of a program as a graph, what a call issues is captured, and replayed while the addresses are the same:

    first call with some addresses      the steps are issued, which also loads the driver's late parts
    second                              they are captured on a stream of the program's own
    then and later                      the graph is launched on XLA's stream

What any thread enqueues on a stream that captures becomes part of the graph, and others work on XLA's stream.

A graph keeps the addresses of its arguments, and XLA may give others in any call: a program has a few graphs,
and the oldest makes room for the next.  Calls that write their times have a block of their own.
Programs that wait for a flag on the host cannot be captured.

    block   lock · next row · rows of: executable graph · whether it is used · addresses

Source: the CUDA driver API, "Graph Management" and "Stream Management"; the capture is of the thread alone,
    so that other threads may call what a capture forbids. xla/ffi/api/c_api.h for the error; cuda.h and
    cublasLt.h for the functions that name a status.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.backends.ffi.frame import FfiFrame
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant

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
`graphs` is null or a block as above, `capturing` the stream on which that captures, `device` the
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


ROWS = 8
"""Graphs that a program has at most."""

HEADER_WORDS, ROW_WORDS = 2, 2
"""Words of a block before its rows, and of a row before its addresses."""

EXECUTABLE, USED, ADDRESSES = 0, 1, 2
"""Words of a row."""

_LOCK, _NEXT = 0, 1
_CAPTURE_OF_THREAD = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_WHERE = "the capture of the call"


def block_words(allocations: int) -> int:
    """Words of the block of a program with so many allocations."""
    return HEADER_WORDS + ROWS * (ROW_WORDS + allocations)


def emit_capture(calls: CallEmitter, allocations: int) -> None:
    """Adds `<name>_issue_or_replay`, which `<name>_issue` has the arguments of.

    Args:
        calls: of the program.
        allocations: how many addresses a call has.
    """
    _CaptureEmitter(calls, allocations).emit()


class _CaptureEmitter:
    def __init__(self, calls: CallEmitter, allocations: int) -> None:
        self.calls, self.name = calls, calls.name
        self.allocations = allocations
        self.row_bytes = 8 * (ROW_WORDS + allocations)

    def emit(self) -> None:
        self._emit_replay()
        with self.calls.function("issue_or_replay", "stream", "memory") as f:
            graphs = self.calls.word(f, "graphs")
            off = f.op(f"icmp eq ptr {graphs}, null", "i1")
            with f.when(off, returns=True, value=Value("%plain", "ptr")):
                self._issue(f, "%plain")
            lock = f.offset(graphs, 8 * _LOCK)
            # Rows are changed under a lock, but no call waits for it: a graph saves time on the host, and
            # waiting would cost it.
            busy = f.compare("ne", f.atomic_exchange(lock, 1), constant(0, "i64"))
            with f.when(busy, returns=True, value=Value("%other", "ptr")):  # another thread is in this call
                self._issue(f, "%other")
            given = [*self._arguments(f), graphs]
            error = f.call(f"{self.name}_replay", *given, result="ptr")
            # in any case, with an error too: `replay` has returned by now
            f.atomic_store(constant(0, "i64"), lock)
            f.ret(error)

    def _emit_replay(self) -> None:
        """`replay(frame, stream, memory, graphs)`, with the lock held."""
        with self.calls.function("replay", "stream", "memory", "graphs") as f:
            # XLA calls from threads of its own, whose context may be another; `issue` sets it, but a replay
            # does not go through that.
            self.calls.call(f, "cuCtxSetCurrent", [self.calls.word(f, "context")], "the call")
            row = self._row(f)
            # New addresses: only noted, with a row. A capture is worth it if they come again, and a plain
            # call loads the driver's late parts first.
            unused = f.op(f"icmp eq ptr {row}, null", "i1")
            with f.when(unused, returns=True, value=Value("%first", "ptr")):
                self._take_row(f)
                self._issue(f, "%first")
            # known addresses without a graph: the second call, or one after a capture that failed
            with f.when(f.op(f"icmp eq ptr {f.load(row, 'ptr', EXECUTABLE)}, null", "i1")):
                self._capture(f, row)
            executable = f.load(row, "ptr", EXECUTABLE)
            self.calls.call(f, "cuGraphLaunch", [executable, f.arguments["stream"]], "the replay of the call")
            f.ret(NULL)

    def _row(self, f: FunctionBuilder) -> Value:
        """The row with the addresses of the call, or null."""
        match = f.stack("ptr")
        f.store(NULL, match)
        with f.loop(0, ROWS) as loop:
            row = self._row_at(f, loop.i)
            # The rows are few, and all are compared. A row that was never used has no addresses, whatever
            # its bytes are.
            differs = f.intrinsic(
                "memcmp", "i32", f.offset(row, 8 * ADDRESSES), f.arguments["memory"], self._address_bytes
            )
            used = f.compare("ne", f.load(row, "i64", USED), constant(0, "i64"))
            same = f.compare("eq", differs, constant(0, "i32"))
            with f.when(f.op(f"and i1 {used}, {same}", "i1")):
                f.store(row, match)
        return f.load(match, "ptr")

    def _row_at(self, f: FunctionBuilder, number: Value) -> Value:
        rows = f.offset(f.arguments["graphs"], 8 * HEADER_WORDS)
        return f.offset(rows, f.imul(number, self.row_bytes))

    @property
    def _address_bytes(self) -> Value:
        return constant(8 * self.allocations, "i64")

    def _take_row(self, f: FunctionBuilder) -> None:
        """Gives the addresses of the call the next row, whose graph is destroyed."""
        graphs = f.arguments["graphs"]
        number = f.load(graphs, "i64", _NEXT)
        following = f.op(f"add i64 {number}, 1", "i64")
        f.store(f.op(f"urem i64 {following}, {ROWS}", "i64"), graphs, _NEXT)
        # Rows are taken in turns; the row is complete before the old graph is destroyed, so that a failure
        # of that leaves no row with a dead graph.
        row = self._row_at(f, number)
        executable = f.load(row, "ptr", EXECUTABLE)
        f.store(NULL, row, EXECUTABLE)
        f.intrinsic("memcpy", "ptr", f.offset(row, 8 * ADDRESSES), f.arguments["memory"], self._address_bytes)
        f.store(constant(1, "i64"), row, USED)
        with f.when(f.op(f"icmp ne ptr {executable}, null", "i1")):
            self.calls.call(f, "cuGraphExecDestroy", [executable], _WHERE)

    def _capture(self, f: FunctionBuilder, row: Value) -> None:
        """Captures the launches of a call; a row whose capture fails stays without a graph."""
        stream, graph, executable = self.calls.word(f, "capturing"), f.stack("ptr"), f.stack("ptr")
        mode = constant(_CAPTURE_OF_THREAD, "i32")
        self.calls.call(f, "cuStreamBeginCapture_v2", [stream, mode], _WHERE)
        self._issue(f, "%captured", stream)
        failed = f.op("icmp ne ptr %captured, null", "i1")
        f.store(NULL, graph)
        # A stream that captures must be ended even if a launch failed: it would stay in that state for
        # ever.
        ended = self.calls.enter(f, "cuStreamEndCapture", [stream, graph])
        with f.when(failed, returns=True, value=Value("%captured", "ptr")):
            self._destroy(f, graph)
        self.calls.fail_if_not_zero(f, ended, "cuStreamEndCapture", _WHERE)
        flags = constant(0, "i64")
        # The executable graph is a copy: the captured one is destroyed in any case, before the status is
        # looked at.
        status = self.calls.enter(f, "cuGraphInstantiateWithFlags", [executable, f.load(graph, "ptr"), flags])
        self._destroy(f, graph)
        self.calls.fail_if_not_zero(f, status, "cuGraphInstantiateWithFlags", _WHERE)
        f.store(f.load(executable, "ptr"), row, EXECUTABLE)

    def _destroy(self, f: FunctionBuilder, graph: Value) -> None:
        """Destroys a graph, if there is one; a failure says nothing about the call."""
        handle = f.load(graph, "ptr")
        with f.when(f.op(f"icmp ne ptr {handle}, null", "i1")):
            self.calls.enter(f, "cuGraphDestroy", [handle])

    def _issue(self, f: FunctionBuilder, result: str, stream: Value | None = None) -> None:
        frame, given, memory = self._arguments(f)
        listed = ", ".join(value.typed for value in (frame, stream or given, memory))
        f.emit(f"{result} = call ptr @{self.name}_issue({listed})")

    def _arguments(self, f: FunctionBuilder) -> list[Value]:
        return [f.arguments[name] for name in ("frame", "stream", "memory")]
