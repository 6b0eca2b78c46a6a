"""A program as a CUDA graph: what a call issues is captured, and replayed while the addresses are the same.

    first call with some addresses      the steps are issued, which also loads the driver's late parts
    second                              they are captured on a stream of the program's own
    then and later                      the graph is launched on XLA's stream

What any thread enqueues on a stream that captures becomes part of the graph, and others work on XLA's stream.

A graph keeps the addresses of its arguments, and XLA may give others in any call: a program has a few graphs,
and the oldest makes room for the next.  Calls that write their times have a block of their own.
Programs that wait for a flag on the host cannot be captured.

    block   lock · next row · rows of: executable graph · whether it is used · addresses

Source: the CUDA driver API, "Graph Management" and "Stream Management"; the capture is of the thread alone,
    so that other threads may call what a capture forbids.
"""

from __future__ import annotations

from mpmd.compile.backends.native_gpu.calls import NULL, CallEmitter
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import Value, constant

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
    """Emission of one function, and of those that it calls."""

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
            busy = f.compare("ne", f.atomic_exchange(lock, 1), constant(0, "i64"))
            with f.when(busy, returns=True, value=Value("%other", "ptr")):  # another thread is in this call
                self._issue(f, "%other")
            given = [*self._arguments(f), graphs]
            made = f.call(f"{self.name}_replay", *given, result="ptr")
            f.atomic_store(constant(0, "i64"), lock)
            f.ret(made)

    def _emit_replay(self) -> None:
        """`replay(frame, stream, memory, graphs)`, with the lock held."""
        with self.calls.function("replay", "stream", "memory", "graphs") as f:
            self.calls.call(f, "cuCtxSetCurrent", [self.calls.word(f, "context")], "the call")
            row = self._row(f)
            unused = f.op(f"icmp eq ptr {row}, null", "i1")
            with f.when(unused, returns=True, value=Value("%first", "ptr")):
                self._take_row(f)
                self._issue(f, "%first")
            with f.when(f.op(f"icmp eq ptr {f.load(row, 'ptr', EXECUTABLE)}, null", "i1")):
                self._capture(f, row)
            executable = f.load(row, "ptr", EXECUTABLE)
            self.calls.call(f, "cuGraphLaunch", [executable, f.arguments["stream"]], "the replay of the call")
            f.ret(NULL)

    def _row(self, f: FunctionBuilder) -> Value:
        """The row with the addresses of the call, or null."""
        found = f.stack("ptr")
        f.store(NULL, found)
        with f.loop(0, ROWS) as loop:
            row = self._row_at(f, loop.i)
            differs = f.intrinsic(
                "memcmp", "i32", f.offset(row, 8 * ADDRESSES), f.arguments["memory"], self._address_bytes
            )
            used = f.compare("ne", f.load(row, "i64", USED), constant(0, "i64"))
            same = f.compare("eq", differs, constant(0, "i32"))
            with f.when(f.op(f"and i1 {used}, {same}", "i1")):
                f.store(row, found)
        return f.load(found, "ptr")

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
        # in any case, or the stream is lost
        ended = self.calls.enter(f, "cuStreamEndCapture", [stream, graph])
        with f.when(failed, returns=True, value=Value("%captured", "ptr")):
            self._destroy(f, graph)
        self.calls.fail_if_not_zero(f, ended, "cuStreamEndCapture", _WHERE)
        flags = constant(0, "i64")
        made = self.calls.enter(f, "cuGraphInstantiateWithFlags", [executable, f.load(graph, "ptr"), flags])
        self._destroy(f, graph)
        self.calls.fail_if_not_zero(f, made, "cuGraphInstantiateWithFlags", _WHERE)
        f.store(f.load(executable, "ptr"), row, EXECUTABLE)

    def _destroy(self, f: FunctionBuilder, graph: Value) -> None:
        """Destroys a graph, if there is one; a failure says nothing about the call."""
        made = f.load(graph, "ptr")
        with f.when(f.op(f"icmp ne ptr {made}, null", "i1")):
            self.calls.enter(f, "cuGraphDestroy", [made])

    def _issue(self, f: FunctionBuilder, result: str, stream: Value | None = None) -> None:
        frame, given, memory = self._arguments(f)
        listed = ", ".join(value.typed for value in (frame, stream or given, memory))
        f.emit(f"{result} = call ptr @{self.name}_issue({listed})")

    def _arguments(self, f: FunctionBuilder) -> list[Value]:
        return [f.arguments[name] for name in ("frame", "stream", "memory")]
