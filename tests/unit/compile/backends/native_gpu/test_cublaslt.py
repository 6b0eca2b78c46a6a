"""The real cuBLASLt, where its wheel is installed, takes descriptions of products; that needs no GPU."""

import contextlib
import ctypes

import pytest

from mpmd.compile.backends.native_gpu.cublaslt import MatrixLibrary
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.compile.backends.native_gpu.products import ProductDescriptor, StoredMatrix
from mpmd.errors import CompileError
from tests.support.simulated_gpu import StandInGpu


class WithoutDevice:
    """The real library, but for the two calls that need a GPU, which are those of a stand-in."""

    def __init__(self):
        self.real, self.other = CudaLibraries().cublaslt, StandInGpu()

    def function(self, name):
        if name == "cublasLtCreate":
            return lambda where: 0
        if name == "cublasLtMatmulAlgoGetHeuristic":
            return self._choose
        return self.real.function(name)

    def _choose(self, *given):
        result, count = given[-2]._obj, given[-1]._obj
        result.workspace, result.state, count.value = 64, 0, 1
        return 0

    def attribute(self, kind, made, number, value):
        """An attribute as the library has kept it."""
        get, written = getattr(self.real.handle, f"cublasLt{kind}GetAttribute"), ctypes.c_size_t()
        get.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert get(made, number, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)) == 0
        return value.value


@pytest.fixture(scope="module")
def library():
    try:
        return WithoutDevice()
    except CompileError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize(
    ("dtype", "result", "sums"),
    [("bf16", "f32", "f32"), ("f16", "f16", "f32"), ("f32", "f32", "tf32"), ("f64", "f64", "f64")],
)
def test_the_library_keeps_what_it_was_told(library, dtype, result, sums, straight):
    m, n, k = 4, 6, 5
    a, b = StoredMatrix(dtype, k, False, m * k), StoredMatrix(dtype, k, True, k * n)
    d = StoredMatrix(result, m if straight else n, straight, m * n)
    with contextlib.ExitStack() as undo:
        made = MatrixLibrary(library).prepare(ProductDescriptor(3, m, n, k, a, b, d, sums), 16, undo)
        words, number = made.words, {"f32": 0, "f64": 1, "f16": 2, "bf16": 14}
        described = {
            name: [
                library.attribute("MatrixLayout", words[name], at, kind())
                for at, kind in (
                    (0, ctypes.c_uint32), (2, ctypes.c_uint64), (3, ctypes.c_uint64), (4, ctypes.c_int64),
                    (5, ctypes.c_int32), (6, ctypes.c_int64),
                )
            ]
            for name in ("a", "b", "d")
        }  # fmt: skip
        ours = {"a": [number[dtype], k, m, k, 3, m * k], "b": [number[dtype], k, n, k, 3, k * n]}
        swapped = ours if straight else {"a": ours["b"], "b": ours["a"]}
        rows, columns = (m, n) if straight else (n, m)
        assert described == {**swapped, "d": [number[result], rows, columns, rows, 3, m * n]}
        taken = [library.attribute("MatmulDesc", words["descriptor"], at, ctypes.c_int32()) for at in (3, 4)]
        assert taken == [1, 0] and made.workspace_bytes == 64  # both factors are stored with k contiguous
