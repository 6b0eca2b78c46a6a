"""A GPU that is not there: the handler of a program, called as XLA calls it, with a driver that computes.

The driver's functions run kernels by Triton's interpreter and products by NumPy, from their descriptors.  All
memory that holds no argument begins as NaN or -1; copies and products outside of the buffers are errors.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from benchmarks.gpu.frame import CallFrame
from mpmd.compile.backends.arrays import numpy_dtype
from mpmd.compile.backends.native_gpu.handler import (
    ENTRIES,
    KERNEL_RECORD,
    PRODUCT_RECORD,
    STATE,
    emit_handler,
)
from mpmd.compile.backends.native_gpu.launches import LaunchProgram
from mpmd.compile.backends.native_gpu.products import StoredMatrix
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.llvm.engine import compile_module
from mpmd.compile.llvm.target import host_target
from mpmd.compile.thunks.poison import POISON

_P, _I, _U, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_SIGNATURES = {
    "cuCtxSetCurrent": (_P,),
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P),
    "cuMemcpyDtoDAsync_v2": (_P, _P, _S, _P),
    "cuMemsetD32Async": (_P, _U, _S, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _P, _S, _P),
    "cuStreamSynchronize": (_P,),
    "cublasLtMatmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _S, _P),
}
STREAM, CONTEXT, SHARED = 0x77, 0xCC, 4096


class StandInGpu:
    """A driver and a matrix library, for one program.

    Args:
        program: what is called.
        fail_at: the call, from 1, that fails with a status.

    Attributes:
        calls: names of the entries that were called.
        broken: errors of the stand-in itself.
    """

    def __init__(self, program: LaunchProgram, fail_at: int = 0) -> None:
        self.program, self.fail_at = program, fail_at
        self.calls: list[str] = []
        self.broken: list[Exception] = []
        module = emit_handler(program, host_target())
        self._code = compile_module(module, [f"{program.name}_handler", f"{program.name}_state"])
        self.function = self._code.function(f"{program.name}_handler", _P, result=_P)
        self.constants = np.frombuffer(program.constants or b"\0", np.uint8).copy()
        self._callbacks = [ctypes.CFUNCTYPE(_I, *_SIGNATURES[name])(self._entry(name)) for name in ENTRIES]
        self._bind()

    def _bind(self) -> None:
        address = self._code.function(f"{self.program.name}_state", result=_P)()
        self.state = (ctypes.c_int64 * len(STATE)).from_address(address)
        table = [ctypes.cast(c, _P).value for c in self._callbacks]
        kernels = [word for n in range(len(self.program.kernels)) for word in (n + 1, SHARED)]
        products = []
        for number in range(len(self.program.descriptors)):
            products += [number + 1 if name == "descriptor" else 0 for name in PRODUCT_RECORD]
        assert len(kernels) == len(KERNEL_RECORD) * len(self.program.kernels)
        self._kept = [np.array(words or [0], np.int64) for words in (table, kernels, products)]
        given = [words.ctypes.data for words in self._kept] + [CONTEXT, self.constants.ctypes.data, 0]
        self.state[:] = given

    def call(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The bytes of the results, from those of the arguments.

        Raises:
            RuntimeError: the handler ended with an error.
        """
        kinds = ("parameter", "result", "constant", "arena")
        assert [a.kind for a in self.program.allocations] == sorted(
            (a.kind for a in self.program.allocations), key=kinds.index
        )
        self.buffers = [np.full(max(a.size, 1), POISON, np.uint8) for a in self.program.allocations]
        for buffer, data in zip(self.buffers, arguments):
            buffer[: data.size] = data
        self.buffers[-2] = self.constants
        given = [b.ctypes.data for b in self.buffers]
        frame = CallFrame(given[: len(arguments)], [*given[len(arguments) : -2], given[-1]], stream=STREAM)
        worked = frame.run(self)
        if self.broken:
            raise self.broken[0]
        if not worked:
            raise RuntimeError(frame.errors[0])
        places = self.program.results
        return [self.buffers[p.allocation][p.offset : p.offset + p.size] for p in places]

    def _entry(self, name: str) -> Any:
        function = getattr(self, f"_{name}")

        def entry(*arguments: int | None) -> int:
            self.calls.append(name)
            if len(self.calls) == self.fail_at:
                return 700
            try:
                function(*(argument or 0 for argument in arguments))
            except Exception as error:
                self.broken.append(error)
                return 999
            return 0

        return entry

    def _memory(self, address: int, size: int) -> np.ndarray:
        """The bytes at an address, which are inside of one buffer."""
        for buffer in self.buffers:
            start = address - buffer.ctypes.data
            if start >= 0 and start + size <= buffer.size:
                return buffer[start : start + size]
        raise AssertionError(f"{size} bytes are not inside of a buffer")

    # -- the entries of the table
    def _cuCtxSetCurrent(self, context: int) -> None:
        assert context == CONTEXT

    def _cuLaunchKernel(self, function: int, *rest: int) -> None:
        *sizes, shared, stream, parameters, extra = rest
        kernel = list(self.program.kernels.values())[function - 1]
        assert sizes == [kernel.grid, 1, 1, 32 * kernel.warps, 1, 1] and (shared, stream) == (SHARED, STREAM)
        pointers = ctypes.cast(parameters, ctypes.POINTER(_P))
        values = [ctypes.cast(pointers[k], ctypes.POINTER(_P))[0] for k in range(len(kernel.pointers) + 2)]
        assert values[-2:] == [None, None] and not extra
        # Triton is imported where there are kernels: programs of products alone run without it
        interpreter = importlib.import_module("tests.support.triton_interpreter")
        for aligned, address in zip(kernel.aligned, values):
            assert not aligned or address % 16 == self.buffers[0].ctypes.data % 16
        interpreter.run_kernel(kernel, values[:-2])

    def _cuMemcpyDtoDAsync_v2(self, target: int, source: int, size: int, stream: int) -> None:
        assert stream == STREAM
        self._memory(target, size)[:] = self._memory(source, size)

    def _cuMemsetD32Async(self, target: int, word: int, count: int, stream: int) -> None:
        assert stream == STREAM
        self._memory(target, 4 * count).view(np.uint32)[:] = word

    def _cuMemcpyDtoHAsync_v2(self, host: int, source: int, size: int, stream: int) -> None:
        assert stream == STREAM
        ctypes.memmove(host, self._memory(source, size).ctypes.data, size)

    def _cuStreamSynchronize(self, stream: int) -> None:
        assert stream == STREAM

    def _cublasLtMatmul(self, *given: int) -> None:
        """As the library's documents say, but that sums are exact to f64 and rounded once."""
        _, descriptor, _, b_at, _, a_at, _, _, c_at, _, d_at, *_ = given
        assert c_at == d_at and given[-1] == STREAM
        this = self.program.descriptors[descriptor - 1]
        a = self._matrices(a_at, this.a, this.batch, this.m, this.k).astype(np.float64)
        b = self._matrices(b_at, this.b, this.batch, this.k, this.n).astype(np.float64)
        d = self._matrices(d_at, this.d, this.batch, this.m, this.n)
        with np.errstate(all="ignore"):
            d[...] = np.matmul(a, b).astype(d.dtype)

    def _matrices(
        self, address: int, matrix: StoredMatrix, batch: int, rows: int, columns: int
    ) -> np.ndarray:
        kind = np.dtype(NUMPY_DTYPE[matrix.dtype])
        steps = (matrix.stride, *((1, matrix.pitch) if matrix.transposed else (matrix.pitch, 1)))
        sizes = (batch, rows, columns)
        reach = sum((size - 1) * step for size, step in zip(sizes, steps)) + 1
        assert matrix.pitch >= (rows if matrix.transposed else columns), "the library refuses such a pitch"
        elements = self._memory(address, reach * kind.itemsize).view(kind)
        return as_strided(elements, sizes, [step * kind.itemsize for step in steps])


def run_program(
    program: LaunchProgram, fragment: FragmentModule, arguments: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The results of a fragment's program."""
    given = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arguments]
    results = StandInGpu(program).call(given)
    return [
        made.view(numpy_dtype(value.dtype)).reshape(value.shape)
        for made, value in zip(results, fragment.results, strict=True)
    ]
