"""The handler of a launch program, emitted as LLVM IR: what XLA calls for the custom call of a fragment.

    XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame)

reads the stream and the data pointers of all arguments and results, the last of which is the arena with the
workspace of products after it, and calls the driver and the matrix library through a table of functions: the
code is the same with and without a GPU.  Everything else that it needs is in a state block, whose words are
listed in `STATE`.

    for a kernel    its function, and the shared memory that it needs
    for a product   the words of `PRODUCT_RECORD`, pointers to objects of the library
    constants       their address on the device

Flags and selectors are copied to the host, which waits for them: loops and branches are the host's.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.backends.ffi.frame import FfiFrame
from mpmd.compile.backends.native_gpu.calls import NULL, STATE, CallEmitter, emit_capture
from mpmd.compile.backends.native_gpu.clock import emit_stamp_if_recorded
from mpmd.compile.backends.native_gpu.cublaslt import SHIFT_POINTER
from mpmd.compile.backends.native_gpu.launches import (
    BranchLaunch,
    CopyLaunch,
    FillLaunch,
    KernelLaunch,
    LaunchProgram,
    LoopLaunch,
    ProductLaunch,
    Step,
)
from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant

KERNEL_RECORD = ("function", "shared_bytes")
PRODUCT_RECORD = ("handle", "descriptor", "alpha", "a", "b", "beta", "c", "d", "algorithm", "workspace_bytes")
"""`a` and `b` are the library's: for a row-major result our b and our a; see `cublaslt.py`."""

WORKSPACE_ALIGNMENT = 256
"""Bytes: where the workspace of products begins; the arena itself may begin anywhere."""

_TRITON_POINTERS = 2  # that each kernel takes after its own: memory of Triton's, which none of ours needs
_WARP = 32
_STREAM_GET_BYTES = 32


def emit_handler(program: LaunchProgram, target: CpuTarget) -> Module:
    """A module with `<name>_handler`, and `<name>_state`, which returns the address of the state block.

    Args:
        program: the launches.
        target: the CPU of the host.
    """
    module = Module(target)
    _HandlerEmitter(module, program).emit()
    return module


class _HandlerEmitter:
    """Emission of one handler: it collects addresses; a function that takes them issues the steps."""

    def __init__(self, module: Module, program: LaunchProgram) -> None:
        self.module, self.program = module, program
        self.name = program.name
        self.kernels = {name: number for number, name in enumerate(program.kernels)}
        self.products = {descriptor: number for number, descriptor in enumerate(program.descriptors)}
        self.calls = CallEmitter(module, program.name)

    def emit(self) -> None:
        with FunctionBuilder(self.module, f"{self.name}_state", [], result="ptr") as f:
            f.ret(self.calls.state)
        self._emit_issue()
        if self.program.is_capturable:
            emit_capture(self.calls, len(self.program.allocations))
        with FunctionBuilder(
            self.module, f"{self.name}_handler", [("frame", "ptr")], result="ptr", plain=True
        ) as f:
            self.f, self.frame = f, FfiFrame(self.module, f)
            self.frame.begin()
            counts = {"arg_count": self._count("parameter"), "ret_count": self._count("result", "arena")}
            for field, count in counts.items():
                wrong = f.compare("ne", self.frame.count(field), constant(count, "i64"))
                text = f"GPU program {self.name}: the call has another {field} than {count}"
                self.frame.fail_if(wrong, f"{self.name}_{field}", text)
            stream = self.frame.ask("stream_get", _STREAM_GET_BYTES, "ptr")
            memory = f.stack("ptr", len(self.program.allocations))
            for number, pointer in enumerate(self._allocations()):
                f.store(pointer, memory, number)
            issue = "issue_or_replay" if self.program.is_capturable else "issue"
            error = f.call(f"{self.name}_{issue}", self.frame.address, stream, memory, result="ptr")
            f.ret(error)

    def _count(self, *kinds: str) -> int:
        return sum(a.kind in kinds for a in self.program.allocations)

    def _word(self, which: str) -> Value:
        return self.calls.word(self.f, which)

    def _call(self, entry: str, values: Sequence[Value], where: str) -> None:
        self.calls.call(self.f, entry, values, where)

    def _allocations(self) -> list[Value]:
        arguments = list(self.frame.buffers("args", self._count("parameter")))
        *results, arena = self.frame.buffers("rets", self._count("result", "arena"))
        return [*arguments, *results, self._word("constants"), arena]

    def _emit_issue(self) -> None:
        """`issue(frame, stream, memory)`: all steps; the error of the first that fails, or null."""
        with self.calls.function("issue", "stream", "memory") as f:
            self.f, self.stream = f, f.arguments["stream"]
            count = len(self.program.allocations)
            self.memory = [f.load(f.arguments["memory"], "ptr", number) for number in range(count)]
            self._call("cuCtxSetCurrent", [self._word("context")], "the call")
            self.host = f.stack("i64")
            self._take_parameters()
            self.workspace = self._workspace() if self.products else NULL
            emit_stamp_if_recorded(self.calls, f, self.stream)
            self._steps(self.program.steps)
            emit_stamp_if_recorded(self.calls, f, self.stream)
            f.ret(NULL)

    def _device(self) -> Value:
        return self.f.load(self.f.offset(self.calls.state, 8 * STATE.index("device")), "i32")

    def _take_parameters(self) -> None:
        """Memory for the arguments of a kernel, which the driver copies: all launches share it."""
        steps = [step for step in self.program.launches() if isinstance(step, KernelLaunch)]
        most = max((len(step.arguments) for step in steps), default=0) + _TRITON_POINTERS
        # The driver copies arguments during the launch. The pointers to them never change, so they are
        # written once; each launch stores its values.
        self.values, self.pointers = self.f.stack("ptr", most), self.f.stack("ptr", most)
        for number in range(most):
            self.f.store(self.f.offset(self.values, 8 * number), self.pointers, number)

    def _workspace(self) -> Value:
        """The first aligned address after the arena."""
        f, arena = self.f, self.program.allocations[-1]
        end = f.offset(self.memory[-1], arena.size + WORKSPACE_ALIGNMENT - 1)
        return f.intrinsic("llvm.ptrmask.p0.i64", "ptr", end, constant(-WORKSPACE_ALIGNMENT, "i64"))

    def _at(self, place: Slice) -> Value:
        return self.f.offset(self.memory[place.allocation], place.offset)

    # -- steps
    def _steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, KernelLaunch):
                self._launch(step)
            elif isinstance(step, ProductLaunch):
                self._multiply(step)
            elif isinstance(step, CopyLaunch):
                pointers = [self._at(step.target), self._at(step.source)]
                size = constant(step.source.size, "i64")
                self._call("cuMemcpyDtoDAsync_v2", [*pointers, size, self.stream], step.name)
            elif isinstance(step, FillLaunch):
                word = self._device() if step.word is None else constant(step.word, "i32")
                count = constant(step.target.size // 4, "i64")
                self._call("cuMemsetD32Async", [self._at(step.target), word, count, self.stream], step.name)
            elif isinstance(step, LoopLaunch):
                self._loop(step)
            else:
                self._branch(step)

    def _launch(self, step: KernelLaunch) -> None:
        f, kernel = self.f, self.program.kernels[step.kernel]
        arguments = [*map(self._at, step.arguments), *[NULL] * _TRITON_POINTERS]
        for number, argument in enumerate(arguments):
            f.store(argument, self.values, number)
        record = f.offset(self._word("kernels"), 8 * len(KERNEL_RECORD) * self.kernels[step.kernel])
        function, shared = f.load(record, "ptr"), f.load(f.offset(record, 8), "i32")
        sizes = [constant(n, "i32") for n in (step.grid, 1, 1, _WARP * kernel.warps, 1, 1)]
        given = [function, *sizes, shared, self.stream, self.pointers, NULL]
        self._call("cuLaunchKernel", given, f"{step.name} ({step.kernel})")

    def _multiply(self, step: ProductLaunch) -> None:
        f = self.f
        number = self.products[step.descriptor]
        record = f.offset(self._word("products"), 8 * len(PRODUCT_RECORD) * number)
        words = {name: f.load(record, "ptr", place) for place, name in enumerate(PRODUCT_RECORD[:-1])}
        size = f.load(record, "i64", PRODUCT_RECORD.index("workspace_bytes"))
        a, b, d = map(self._at, (step.a, step.b, step.d))
        before = d if step.added is None else self._at(step.added)
        first, second = (a, b) if step.descriptor.d.transposed else (b, a)
        factors = [words["alpha"], first, words["a"], second, words["b"]]
        results = [words["beta"], before, words["c"], d, words["d"]]
        rest = [words["algorithm"], self.workspace, size, self.stream]
        given = [words["handle"], words["descriptor"], *factors, *results, *rest]
        if step.shift is None:
            self._call("cublasLtMatmul", given, step.name)
        else:
            self._multiply_and_shift(step, words["descriptor"], self._at(step.shift), given)

    def _multiply_and_shift(
        self, step: ProductLaunch, descriptor: Value, shift: Value, given: Sequence[Value]
    ) -> None:
        """A call whose vector's address is in the descriptor, which other threads' calls change, too."""
        f, set_attribute = self.f, "cublasLtMatmulDescSetAttribute"
        # The address is a field of the descriptor, which all calls of the program share: set and used under
        # a lock. On an error the lock is freed first.
        lock, free = f.offset(self.calls.state, 8 * STATE.index("multiplying")), constant(0, "i64")
        with f.repeat() as leave_if:
            leave_if(f.compare("eq", f.atomic_exchange(lock, 1), free))
            f.pause()
        f.store(shift, self.host)
        changed = [descriptor, constant(SHIFT_POINTER, "i32"), self.host, constant(8, "i64")]
        status = self.calls.enter(f, set_attribute, changed)
        with f.when(f.compare("ne", status, constant(0, "i32"))):
            f.atomic_store(free, lock)
        self.calls.fail_if_not_zero(f, status, set_attribute, step.name)
        status = self.calls.enter(f, "cublasLtMatmul", given)
        f.atomic_store(free, lock)
        self.calls.fail_if_not_zero(f, status, "cublasLtMatmul", step.name)

    def _loop(self, step: LoopLaunch) -> None:
        if step.trips is not None:
            with self.f.loop(0, step.trips):
                self._steps(step.body)
            return
        with self.f.repeat() as leave_if:
            self._steps(step.condition)
            flag = self._read(step.flag, "i8", step.name)
            leave_if(self.f.compare("eq", flag, constant(0, "i8")))
            self._steps(step.body)

    def _branch(self, step: BranchLaunch) -> None:
        f, last = self.f, len(step.branches) - 1
        given = self._read(step.selector, "i32", step.name)
        outside = f.compare("ugt", given, constant(last, "i32"))  # negative numbers are large ones
        selector = f.select(outside, constant(last, "i32"), given)
        for number, branch in enumerate(step.branches):
            with f.when(f.compare("eq", selector, constant(number, "i32"))):
                self._steps(branch)

    def _read(self, place: Slice, type_: str, name: str) -> Value:
        """A number of the device, once all before it is done."""
        # The stream is waited for: why a program with such a step cannot be captured.
        size = constant({"i8": 1, "i32": 4}[type_], "i64")
        self._call("cuMemcpyDtoHAsync_v2", [self.host, self._at(place), size, self.stream], name)
        self._call("cuStreamSynchronize", [self.stream], name)
        return self.f.load(self.host, type_)
