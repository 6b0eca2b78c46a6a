"""CuBLASLt on one GPU: a handle, and for each product the library's objects and its algorithm.

The library is column-major: a row-major array is to it the transposed one.  So a row-major d = a · b is its
dᵀ = bᵀ · aᵀ, with the operands swapped and nothing moved; a column-major d is its d = a · b.

Source: the cuBLAS documentation, "Using the cuBLASLt API"; the numbers are enums of cublasLt.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Collection
from typing import Any

from mpmd.compile.backends.native_gpu.libraries import DeviceError, FunctionLibrary, StatusLibrary
from mpmd.compile.backends.native_gpu.products import ProductDescriptor, StoredMatrix

WORKSPACE_LIMIT = 32 << 20
"""Bytes that an algorithm may use beside its operands; the library's advice for Hopper."""

_DTYPES = {"f32": 0, "f64": 1, "f16": 2, "bf16": 14}  # cudaDataType
_COMPUTE = {"f32": 68, "tf32": 77, "f64": 70}  # cublasComputeType_t
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, SHIFT_POINTER = 3, 4, 7, 8  # cublasLtMatmulDescAttributes_t
_SHIFTS = 4  # cublasLtEpilogue_t: a vector is added to each of the library's columns
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # cublasLtMatrixLayoutAttribute_t
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t: bytes; of A, B, C, D
_SUCCESS, _NOT_SUPPORTED = 0, 15  # cublasStatus_t


class Heuristic(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: 96 bytes; the algorithm is the first 64."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class NoAlgorithm(DeviceError):
    """The library has no algorithm for some products.

    Args:
        message: says so.
        products: which.
    """

    def __init__(self, message: str, products: Collection[ProductDescriptor]) -> None:
        super().__init__(message)
        self.products = frozenset(products)


@dataclasses.dataclass(frozen=True)
class PreparedProduct:
    """A product that can be started.

    Attributes:
        words: the words of its record, by name; see `handler.PRODUCT_RECORD`.
        workspace_bytes: that its algorithm needs.
        kept: objects whose addresses are among the words.
    """

    words: dict[str, int]
    workspace_bytes: int
    kept: tuple[Any, ...] = dataclasses.field(repr=False)


class MatrixLibrary(StatusLibrary):
    """The library with a handle, which lives as long as the process.

    Args:
        library: its functions.

    Raises:
        DeviceError: it does not start; the calling thread must have the GPU's context.
    """

    def __init__(self, library: FunctionLibrary) -> None:
        super().__init__(library, "cuBLASLt")
        handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(handle), what="starting cuBLASLt")
        self.handle = handle.value or 0

    @property
    def version(self) -> int:
        """Such as 130100 for 13.1."""
        return int(self.function("cublasLtGetVersion")())

    def words(self, status: int) -> str:
        name = self.function("cublasLtGetStatusName")(status)
        return ctypes.string_at(name).decode() if name else "unknown error"

    def prepare(
        self, product: ProductDescriptor, alignment: int, undo: contextlib.ExitStack
    ) -> PreparedProduct:
        """Describes a product to the library, and has it choose an algorithm.

        Args:
            product: its sizes and matrices.
            alignment: bytes; each matrix begins at a multiple of it in every call.
            undo: releases the library's objects.

        Raises:
            DeviceError: a call failed.
            NoAlgorithm: the library has none.
        """
        return _Preparation(self, product, alignment, undo).prepared()

    def shift(self, product: PreparedProduct, address: int) -> None:
        """Says where the vector is that the next call of a product adds.

        Raises:
            DeviceError: the library does not take it.
        """
        name, pointer = "cublasLtMatmulDescSetAttribute", ctypes.c_uint64(address)
        given = (product.words["descriptor"], SHIFT_POINTER, ctypes.byref(pointer), ctypes.sizeof(pointer))
        self.call(name, *given, what="a product that adds a vector")


class _Preparation:
    def __init__(
        self, library: MatrixLibrary, product: ProductDescriptor, alignment: int, undo: contextlib.ExitStack
    ) -> None:
        self.library, self.product, self.alignment, self.undo = library, product, alignment, undo

    def prepared(self) -> PreparedProduct:
        this = self.product
        compute, scale = _COMPUTE[this.sums], _DTYPES["f64" if this.sums == "f64" else "f32"]
        a, b = self._factors()
        descriptor = self._object("MatmulDesc", compute, scale)
        for attribute, transposed in ((_TRANSPOSE_A, a.transposed), (_TRANSPOSE_B, b.transposed)):
            self._set("MatmulDesc", descriptor, attribute, ctypes.c_int32(transposed))
        if this.shifts:
            # its address, which each call sets, promises as much as the matrices' addresses
            self._set("MatmulDesc", descriptor, _EPILOGUE, ctypes.c_int32(_SHIFTS))
            self._set("MatmulDesc", descriptor, SHIFT_POINTER, ctypes.c_uint64(self.alignment))
        layouts = {"a": self._layout(a), "b": self._layout(b), "d": self._layout(self._result())}
        choice = self._algorithm(descriptor, layouts)
        number = ctypes.c_double if this.sums == "f64" else ctypes.c_float
        one, before = number(1.0), number(float(this.adds))
        words = {
            "handle": self.library.handle,
            "descriptor": descriptor.value or 0,
            "alpha": ctypes.addressof(one),
            "beta": ctypes.addressof(before),
            "c": layouts["d"].value or 0,
            **{name: layout.value or 0 for name, layout in layouts.items()},
            "algorithm": ctypes.addressof(choice),
            "workspace_bytes": choice.workspace,
        }
        return PreparedProduct(words, choice.workspace, (one, before, choice))

    def _factors(self) -> tuple[_ColumnMajor, _ColumnMajor]:
        this = self.product
        a = _ColumnMajor.of(this.a, this.m, this.k, this.d.transposed)
        b = _ColumnMajor.of(this.b, this.k, this.n, this.d.transposed)
        return (a, b) if this.d.transposed else (b, a)

    def _result(self) -> _ColumnMajor:
        return _ColumnMajor.of(self.product.d, self.product.m, self.product.n, self.product.d.transposed)

    def _layout(self, matrix: _ColumnMajor) -> ctypes.c_void_p:
        layout = self._object("MatrixLayout", matrix.dtype, matrix.rows, matrix.columns, matrix.pitch)
        if self.product.batch > 1:
            self._set("MatrixLayout", layout, _BATCH_COUNT, ctypes.c_int32(self.product.batch))
            self._set("MatrixLayout", layout, _BATCH_STRIDE, ctypes.c_int64(matrix.stride))
        return layout

    def _algorithm(self, descriptor: ctypes.c_void_p, layouts: dict[str, ctypes.c_void_p]) -> Heuristic:
        with contextlib.ExitStack() as undo:
            preference = self._object("MatmulPreference", undo=undo)
            self._set("MatmulPreference", preference, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_LIMIT))
            for attribute in _ALIGNMENTS:
                self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(self.alignment))
            choice, count, what = Heuristic(), ctypes.c_int(), self._what
            a, b, d = layouts["a"], layouts["b"], layouts["d"]
            given = (descriptor, a, b, d, d, preference, 1, ctypes.byref(choice), ctypes.byref(count))
            name = "cublasLtMatmulAlgoGetHeuristic"
            # That it knows no algorithm is an answer, by status or by an empty list: such products become
            # kernels.
            status = int(self.library.function(name)(self.library.handle, *given))
            if status != _NOT_SUPPORTED:
                self.library.check(name, status, what)
        if status == _NOT_SUPPORTED or count.value < 1 or choice.state != _SUCCESS:
            raise NoAlgorithm(f"{what}: cuBLASLt has no algorithm for it", [self.product])
        return choice

    @property
    def _what(self) -> str:
        return f"preparing the product {self.product}"

    def _object(
        self, kind: str, *arguments: Any, undo: contextlib.ExitStack | None = None
    ) -> ctypes.c_void_p:
        """An object of the library, which is released with the product, or earlier."""
        handle = ctypes.c_void_p()
        self.library.call(f"cublasLt{kind}Create", ctypes.byref(handle), *arguments, what=self._what)
        release = self.library.function(f"cublasLt{kind}Destroy")
        (undo or self.undo).callback(release, handle)
        return handle

    def _set(self, kind: str, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self.library.call(
            f"cublasLt{kind}SetAttribute", handle, attribute, ctypes.byref(value), ctypes.sizeof(value),
            what=self._what,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _ColumnMajor:
    """A matrix as the library describes it.

    Attributes:
        dtype: its number for the elements' type.
        rows, columns: as stored, where columns are contiguous.
        pitch: elements from one column to the next.
        stride: elements from one batch index to the next.
        transposed: whether the product takes it transposed.
    """

    dtype: int
    rows: int
    columns: int
    pitch: int
    stride: int
    transposed: bool

    @staticmethod
    def of(matrix: StoredMatrix, rows: int, columns: int, straight: bool) -> _ColumnMajor:
        """A matrix of `rows` by `columns`, in a product whose result is column-major if `straight`."""
        if not matrix.transposed:
            rows, columns = columns, rows
        # Stored by rows is transposed to the library, unless the whole product is: for a row-major result
        # it computes dᵀ = bᵀ · aᵀ, where all change at once.
        taken = matrix.transposed != straight
        return _ColumnMajor(_DTYPES[matrix.dtype], rows, columns, matrix.pitch, matrix.stride, taken)
