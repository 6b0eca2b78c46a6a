"""An XLA FFI handler for a GPU, written as LLVM IR: it launches a sequence of steps on XLA's stream.

    XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame)

takes the stream and the data pointers of all arguments and results, and calls the driver and cuBLASLt through
a table of function pointers (`table.py`).  What it needs besides the frame lies in a state block:

    word  0 table    1 kernels    2 products    3 context    4 calls    5 failed step    6 its status

The first four are put there by `bind`; the handler counts calls and notes failures in the others.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.table import ENTRIES
from mpmd.compile.backends.ffi.frame import FfiFrame, check_version
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.engine import LoadedCode, compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant

COMMAND_BUFFER = 1  # trait: the call may be captured in a CUDA graph
STREAM_GET_BYTES = 32
TABLE, KERNELS, PRODUCTS, CONTEXT, CALLS, FAILED_STEP, FAILED_STATUS, _STATE_WORDS = range(8)
# words of a product's record, filled by `cublaslt.Product`
HANDLE, DESCRIPTOR, ALPHA, A, B, BETA, C, D, ALGORITHM, WORKSPACE_BYTES, PRODUCT_WORDS = range(11)
BIAS_POINTER, AUX_POINTER = 8, 11


@dataclasses.dataclass(frozen=True)
class GpuBuffer:
    """The memory of an argument or a result; arguments are counted first."""

    number: int


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A number of an LLVM type, `i32` or `float`."""

    type: str
    value: float | int


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel.

    Attributes:
        kernel: its number among those bound.
        grid: blocks along each dim.
        threads: of a block.
        parameters: what it takes; None is a null pointer (Triton's kernels end with two).
        shared: bytes of dynamic shared memory.
    """

    kernel: int
    grid: tuple[int, int, int]
    threads: int
    parameters: tuple[GpuBuffer | Scalar | None, ...]
    shared: int = 0


@dataclasses.dataclass(frozen=True)
class MemoryCopy:
    """Bytes from one buffer to another."""

    target: GpuBuffer
    source: GpuBuffer
    bytes: int


@dataclasses.dataclass(frozen=True)
class Fill:
    """A 32-bit word, repeated."""

    target: GpuBuffer
    word: int
    count: int


@dataclasses.dataclass(frozen=True)
class Multiply:
    """A matrix product by cuBLASLt, all operands row-major: d = epilogue(a · b).

    Attributes:
        product: its number among those bound.
        workspace: scratch memory, or None.
        bias: read by a bias epilogue, written by a bias gradient.
        aux: written by a forward activation that keeps its input, read by a backward one.
    """

    product: int
    a: GpuBuffer
    b: GpuBuffer
    d: GpuBuffer
    workspace: GpuBuffer | None = None
    bias: GpuBuffer | None = None
    aux: GpuBuffer | None = None


Step = Launch | MemoryCopy | Fill | Multiply


def emit(
    target: CpuTarget, name: str, steps: Sequence[Step], *, arguments: int, results: int, traits: int = 0
) -> Module:
    """The module of a handler: `<name>` and `<name>_state`, which returns the address of its state block."""
    module = Module(target)
    module.add_global(f"{name}_words", f"internal global [{_STATE_WORDS} x i64] zeroinitializer")
    with FunctionBuilder(module, f"{name}_state", [], result="ptr") as f:
        f.ret(Value(f"@{name}_words", "ptr"))
    _Emitter(module, name, arguments, results, traits).emit(steps)
    return module


class _Emitter:
    """Emission of one handler."""

    def __init__(self, module: Module, name: str, arguments: int, results: int, traits: int) -> None:
        self.module, self.name, self.traits = module, name, traits
        self.counts = {"arg_count": arguments, "ret_count": results}
        self.state = Value(f"@{name}_words", "ptr")

    def emit(self, steps: Sequence[Step]) -> None:
        null = Value("null", "ptr")
        with FunctionBuilder(self.module, self.name, [("frame", "ptr")], result="ptr") as f:
            self.f, self.frame = f, FfiFrame(self.module, f)
            self.frame.begin(traits=self.traits)
            for field, count in self.counts.items():
                other = f.compare("ne", self.frame.count(field), constant(count, "i64"))
                self._fail_if(other, f"{self.name}: the call has another {field} than {count}")
            self.stream = self.frame.ask("stream_get", STREAM_GET_BYTES, "ptr")
            f.atomic_add(f.offset(self.state, 8 * CALLS), 1)
            self.buffers = [
                *self.frame.buffers("args", self.counts["arg_count"]),
                *self.frame.buffers("rets", self.counts["ret_count"]),
            ]
            self.table = f.load(self.state, "ptr", TABLE)
            self._call(-1, "cuCtxSetCurrent", [f.load(self.state, "ptr", CONTEXT)])
            for number, step in enumerate(steps):
                self._step(number, step)
            f.ret(null)

    def _step(self, number: int, step: Step) -> None:
        match step:
            case Launch():
                self._launch(number, step)
            case MemoryCopy(target, source, count):
                pointers = [self._pointer(target), self._pointer(source)]
                self._call(number, "cuMemcpyDtoDAsync_v2", [*pointers, constant(count, "i64"), self.stream])
            case Fill(target, word, count):
                numbers = [constant(word, "i32"), constant(count, "i64")]
                self._call(number, "cuMemsetD32Async", [self._pointer(target), *numbers, self.stream])
            case Multiply():
                self._multiply(number, step)

    def _pointer(self, buffer: GpuBuffer | None) -> Value:
        return Value("null", "ptr") if buffer is None else self.buffers[buffer.number]

    def _launch(self, number: int, step: Launch) -> None:
        f = self.f
        pointers = f.stack("ptr", max(1, len(step.parameters)))
        for place, parameter in enumerate(step.parameters):
            if isinstance(parameter, Scalar):
                value = constant(parameter.value, parameter.type)
            else:
                value = self._pointer(parameter)
            slot = f.stack(value.type)
            f.store(value, slot)
            f.store(slot, pointers, place)
        kernel = f.load(f.load(self.state, "ptr", KERNELS), "ptr", step.kernel)
        sizes = [constant(size, "i32") for size in (*step.grid, step.threads, 1, 1, step.shared)]
        nothing = Value("null", "ptr")
        self._call(number, "cuLaunchKernel", [kernel, *sizes, self.stream, pointers, nothing])

    def _multiply(self, number: int, step: Multiply) -> None:
        f = self.f
        records = f.load(self.state, "ptr", PRODUCTS)
        record = f.offset(records, 8 * PRODUCT_WORDS * step.product)

        def word(which: int) -> Value:
            return f.load(record, "ptr", which)

        for attribute, buffer in ((BIAS_POINTER, step.bias), (AUX_POINTER, step.aux)):
            if buffer is not None:
                slot = f.stack("ptr")
                f.store(self._pointer(buffer), slot)
                given = [word(DESCRIPTOR), constant(attribute, "i32"), slot, constant(8, "i64")]
                self._call(number, "cublasLtMatmulDescSetAttribute", given)
        # The library is column-major: row-major a · b is its b · a, all transposed.
        d = self._pointer(step.d)
        operands = [word(ALPHA), self._pointer(step.b), word(A), self._pointer(step.a), word(B), word(BETA)]
        memory = [self._pointer(step.workspace), f.load(record, "i64", WORKSPACE_BYTES)]
        given = [word(HANDLE), word(DESCRIPTOR), *operands, d, word(C), d, word(D), word(ALGORITHM), *memory]
        self._call(number, "cublasLtMatmul", [*given, self.stream])

    def _call(self, step: int, entry: str, values: Sequence[Value]) -> None:
        """Calls an entry of the table; another status than 0 ends the handler with an error."""
        f = self.f
        function = f.load(self.table, "ptr", ENTRIES.index(entry))
        status = f.op(f"call i32 {function}({', '.join(value.typed for value in values)})", "i32")
        failed = f.compare("ne", status, constant(0, "i32"))
        with f.when(failed):
            f.store(constant(step, "i64"), self.state, FAILED_STEP)
            f.store(f.cast("sext", status, "i64"), self.state, FAILED_STATUS)
        self._fail_if(failed, f"{self.name}: {entry} of step {step} failed")

    def _fail_if(self, condition: Value, message: str) -> None:
        text = message.encode()
        symbol = f"{self.name}_m{len(text)}_{sum((k + 1) * byte for k, byte in enumerate(text))}"
        self.frame.fail_if(condition, symbol, message)


class Handler:
    """A compiled handler with its state.

    Attributes:
        name: of its function; also its custom call target.
    """

    def __init__(
        self,
        target: CpuTarget,
        name: str,
        steps: Sequence[Step],
        *,
        arguments: int,
        results: int,
        traits: int = 0,
    ) -> None:
        self.name = name
        self.module = emit(target, name, steps, arguments=arguments, results=results, traits=traits)
        self._code: LoadedCode = compile_module(self.module, [name, f"{name}_state"])
        address = self._code.function(f"{name}_state", result=ctypes.c_void_p)()
        self._words = (ctypes.c_int64 * _STATE_WORDS).from_address(address)
        self._kept: list[Any] = []
        _KEPT.append(self)

    @property
    def function(self) -> Any:
        """The handler as a ctypes function of an address."""
        return self._code.function(self.name, ctypes.c_void_p, result=ctypes.c_void_p)

    @property
    def calls(self) -> int:
        """How often XLA (or a test) had it launch its steps."""
        return int(self._words[CALLS])

    @property
    def failure(self) -> tuple[int, int]:
        """The step that failed last, and its status; (0, 0) if none did."""
        return int(self._words[FAILED_STEP]), int(self._words[FAILED_STATUS])

    def bind(
        self, table: Any, kernels: Sequence[int] = (), products: Any | None = None, context: int = 0
    ) -> None:
        """Gives it what it calls: a table, kernels, records of products and a context."""
        listed = (ctypes.c_void_p * max(1, len(kernels)))(*kernels)
        self._kept += [table, listed, products]
        self._words[TABLE] = ctypes.addressof(table)
        self._words[KERNELS] = ctypes.addressof(listed)
        self._words[PRODUCTS] = 0 if products is None else ctypes.addressof(products)
        self._words[CONTEXT] = context

    def register(self, platform: str = "CUDA") -> None:
        """Makes it a custom call target; for the life of the process."""
        import jax

        check_version()
        jax.ffi.register_ffi_target(self.name, jax.ffi.pycapsule(self.function), platform=platform)

    def call(self, *operands: Any, results: Sequence[Any], aliases: dict[int, int] | None = None) -> Any:
        """The custom call inside of traced code; `results` are shapes with dtypes."""
        import jax

        return jax.ffi.ffi_call(self.name, list(results), input_output_aliases=dict(aliases or {}))(*operands)


_KEPT: list[Handler] = []  # XLA may call a registered handler at any time
