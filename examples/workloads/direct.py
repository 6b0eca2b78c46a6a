"""Single kernels on NumPy arrays, without XLA: for tests and benchmarks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mpmd.compile.backends.native_cpu.ffi import aligned_empty, program_memory
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import KernelSequence
from mpmd.compile.backends.native_cpu.shared import CpuKernel, shared_code
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.engine import compile_module
from mpmd.compile.llvm.function_builder import Module


def row_major(
    m: int,
    n: int,
    k: int,
    dtype: str = "f32",
    *,
    out_dtype: str | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    batch: tuple[int, ...] = (),
) -> Gemm:
    """A product of dense row-major arrays.

    Args:
        m: rows of the result.
        n: columns of the result.
        k: length of the sums.
        dtype: of both operands.
        out_dtype: of the result; the operands' if not given.
        transpose_a: A is stored `[k, m]`.
        transpose_b: B is stored `[n, k]`.
        batch: leading dims that all three arrays have.
    """

    def dense(rows: int, columns: int, kind: str, transposed: bool) -> Matrix:
        strides = [rows * columns * math.prod(batch[i + 1 :]) for i in range(len(batch))]
        steps = (1, rows) if transposed else (columns, 1)
        return Matrix(kind, *steps, tuple(strides))

    a, b = dense(m, k, dtype, transpose_a), dense(k, n, dtype, transpose_b)
    return Gemm(m, n, k, a, b, dense(m, n, out_dtype or dtype, False), batch)


def program_array(shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
    """An uninitialised array in memory of its own, such as a program keeps; see `program_memory`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return program_memory(size).view(dtype).reshape(shape)


def share(units: int, thread: int, threads: int) -> tuple[int, int]:
    """The range of units that one of several threads does."""
    return units * thread // threads, units * (thread + 1) // threads


class DirectKernel:
    """A compiled kernel that runs on arrays.

    Args:
        kernel: what to compile.
        target: the CPU, which must be this one or a subset of it.
        threads: how many threads run it, each with a share of the units.
    """

    def __init__(self, kernel: CpuKernel, target: CpuTarget, *, threads: int = 1) -> None:
        self.kernel = kernel
        module = Module(target)
        shared = shared_code(kernel.emit(module), target)
        self.code = compile_module(module, [kernel.name], shared)
        pointers = [ctypes.c_void_p] * (len(kernel.pointers) + 1)
        self._function = self.code.function(kernel.name, *pointers, ctypes.c_int64, ctypes.c_int64)
        self._workspaces = [program_memory(kernel.workspace_bytes) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def __call__(self, *arrays: np.ndarray) -> None:
        """Run on arrays in the order of the kernel's pointers; results are written into theirs."""
        if len(arrays) != len(self.kernel.pointers):
            raise TypeError(
                f"kernel {self.kernel.name} takes {', '.join(self.kernel.pointers)}: "
                f"{len(self.kernel.pointers)} arrays, got {len(arrays)}"
            )
        addresses = [a.ctypes.data for a in arrays]
        threads = len(self._workspaces)
        others = [
            self._pool.submit(self.run, addresses, t, share(self.kernel.units, t, threads))
            for t in range(1, threads)
            if self._pool is not None
        ]
        self.run(addresses, 0, share(self.kernel.units, 0, threads))
        for other in others:
            other.result()

    def run(self, addresses: Sequence[int], thread: int, units: tuple[int, int]) -> None:
        """Run a range of units on raw addresses with one thread's workspace."""
        self._function(*addresses, self._workspaces[thread].ctypes.data, *units)

    def prepare(self, *arrays: np.ndarray) -> Callable[[], None]:
        """All units on these arrays by one thread, as a call that costs the kernel alone: to be timed."""
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays, self._workspaces[0])]
        arguments = (*pointers, ctypes.c_int64(0), ctypes.c_int64(self.kernel.units))
        function, held = self._function, (arrays, self._workspaces)

        def call(function: Any = function, arguments: Any = arguments, held: Any = held) -> None:
            function(*arguments)

        return call


class DirectSequence:
    """The compiled kernels of one plan, run on arrays.

    Args:
        sequence: what to compile.
        target: the CPU, which must be this one or a subset of it.
        threads: how many threads run each kernel.
    """

    def __init__(self, sequence: KernelSequence, target: CpuTarget, *, threads: int = 1) -> None:
        self.sequence = sequence
        self.kernels = [DirectKernel(k, target, threads=threads) for k in sequence.kernels]
        self._temporaries = {t.name: aligned_empty((t.bytes,), np.uint8) for t in sequence.temporaries}

    def __call__(self, *arrays: np.ndarray) -> None:
        """Run on one array per operand of the plan."""
        named = {f"p{k}": array for k, array in enumerate(arrays)} | self._temporaries
        for kernel in self.kernels:
            kernel(*(named[p] for p in kernel.kernel.pointers))

    def prepare(self, *arrays: np.ndarray) -> Callable[[], None]:
        """All kernels on these arrays by one thread; see `DirectKernel.prepare`."""
        named = {f"p{k}": array for k, array in enumerate(arrays)} | self._temporaries
        calls = [k.prepare(*(named[p] for p in k.kernel.pointers)) for k in self.kernels]

        def call() -> None:
            for run in calls:
                run()

        return calls[0] if len(calls) == 1 else call
