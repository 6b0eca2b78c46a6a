"""Matrix products of cuBLASLt, by ctypes.

Descriptors, layouts and epilogues are objects of the host and can be made without a GPU.  Only a handle and
the choice of an algorithm need one.  The library is column-major: a row-major a · b is its b · a with all
matrices transposed, which costs nothing but care.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from benchmarks.gpu.handler import (
    ALGORITHM,
    ALPHA,
    AUX_POINTER,
    BETA,
    BIAS_POINTER,
    DESCRIPTOR,
    HANDLE,
    PRODUCT_WORDS,
    WORKSPACE_BYTES,
    A,
    B,
    C,
    D,
)
from mpmd.compile.backends.native_gpu.cublaslt import WORKSPACE_LIMIT as WORKSPACE
from mpmd.compile.backends.native_gpu.cublaslt import Heuristic
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.errors import CompileError

_COMPUTE_F32, _F32, _BF16 = 68, 0, 14
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _AUX_LD = 3, 4, 7, 12
_MAX_WORKSPACE = 1
_DTYPES = {"float32": _F32, "bfloat16": _BF16}
# cublasLtEpilogue_t; gelu is its tanh form
EPILOGUES = {"": 1, "bias": 4, "gelu_aux_bias": 164, "dgelu_bgrad": 208, "bgrada": 256, "bgradb": 512}
_STATUS = {
    1: "NOT_INITIALIZED (no GPU, or no driver)",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
}


@dataclasses.dataclass(frozen=True)
class MatmulProblem:
    """d[m, n] = epilogue(a[m, k] · b[k, n]), row-major; `transpose_a` says that a is stored as [k, m]."""

    m: int
    n: int
    k: int
    epilogue: str = ""
    transpose_a: bool = False
    transpose_b: bool = False
    dtype: str = "bfloat16"

    @property
    def flops(self) -> int:
        """Of the product."""
        return 2 * self.m * self.n * self.k


class CublasLt:
    """The library; with `create` also its handle."""

    def __init__(self) -> None:
        self.library = CudaLibraries().cublaslt
        self.handle = ctypes.c_void_p()

    @property
    def version(self) -> int:
        """Such as 130100 for 13.1."""
        return int(self.library.function("cublasLtGetVersion")())

    def create(self) -> None:
        """Makes the handle, in the current CUDA context."""
        self.call("cublasLtCreate", ctypes.byref(self.handle))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function; raises a CompileError if it fails."""
        status = self.library.function(name)(*arguments)
        if status:
            raise CompileError(f"{name} failed: {_STATUS.get(status, 'unknown error')} (status {status})")


class Product:
    """One product: its descriptors, and the algorithms that the library proposes for it."""

    def __init__(self, lt: CublasLt, problem: MatmulProblem) -> None:
        self.problem, self._lt = problem, lt
        dtype = _DTYPES[problem.dtype]
        self.descriptor = ctypes.c_void_p()
        lt.call("cublasLtMatmulDescCreate", ctypes.byref(self.descriptor), _COMPUTE_F32, _F32)
        self._set(_TRANSPOSE_A, ctypes.c_int32(problem.transpose_b))
        self._set(_TRANSPOSE_B, ctypes.c_int32(problem.transpose_a))
        self._set(_EPILOGUE, ctypes.c_int32(EPILOGUES[problem.epilogue]))
        aligned = ctypes.c_void_p(1 << 20)  # only its alignment counts until the handler puts the real one
        if "bias" in problem.epilogue or "bgrad" in problem.epilogue:
            self._set(BIAS_POINTER, aligned)
        if "gelu" in problem.epilogue:
            self._set(AUX_POINTER, aligned)
            self._set(_AUX_LD, ctypes.c_int64(problem.n))
        m, n, k = problem.m, problem.n, problem.k
        a = (m, k) if problem.transpose_a else (k, m)  # rows and columns of the stored array, column-major
        b = (k, n) if problem.transpose_b else (n, k)
        self._layouts = [self._layout(dtype, *shape) for shape in (b, a, (n, m))]
        self._preference = ctypes.c_void_p()
        lt.call("cublasLtMatmulPreferenceCreate", ctypes.byref(self._preference))
        limit = ctypes.c_size_t(WORKSPACE)
        lt.call(
            "cublasLtMatmulPreferenceSetAttribute",
            self._preference, _MAX_WORKSPACE, ctypes.byref(limit), ctypes.sizeof(limit),
        )  # fmt: skip
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._found: Any = None
        self.algorithms = 0

    def _set(self, attribute: int, value: Any) -> None:
        self._lt.call(
            "cublasLtMatmulDescSetAttribute",
            self.descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value),
        )  # fmt: skip

    def _layout(self, dtype: int, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._lt.call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout), dtype, ctypes.c_uint64(rows), ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )  # fmt: skip
        return layout

    def propose(self, most: int = 8) -> int:
        """Asks the library for algorithms, best first by its own guess; how many there are.

        Raises:
            CompileError: it has none for this problem.
        """
        self._found, count = (Heuristic * most)(), ctypes.c_int()
        b, a, d = self._layouts
        self._lt.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._lt.handle, self.descriptor, b, a, d, d, self._preference, most, self._found,
            ctypes.byref(count),
        )  # fmt: skip
        self.algorithms = sum(self._found[i].state == 0 for i in range(count.value))
        if not self.algorithms:
            raise CompileError(f"cuBLASLt has no algorithm for {self.problem}")
        return self.algorithms

    def write(self, records: Any, number: int, algorithm: int = 0) -> None:
        """Fills the record that a handler reads; without proposals its algorithm is null."""
        b, a, d = self._layouts
        words = {
            HANDLE: self._lt.handle.value,
            DESCRIPTOR: self.descriptor.value,
            ALPHA: ctypes.addressof(self._one),
            A: b.value,
            B: a.value,
            BETA: ctypes.addressof(self._zero),
            C: d.value,
            D: d.value,
            ALGORITHM: ctypes.addressof(self._found[algorithm]) if self._found else 0,
            WORKSPACE_BYTES: WORKSPACE,
        }
        for word, value in words.items():
            records[number * PRODUCT_WORDS + word] = value or 0


def make_records(products: list[Product]) -> Any:
    """The records of several products, for `Handler.bind`."""
    records = (ctypes.c_int64 * (PRODUCT_WORDS * max(1, len(products))))()
    for number, product in enumerate(products):
        product.write(records, number)
    return records
