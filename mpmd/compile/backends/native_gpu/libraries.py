"""The CUDA driver and cuBLASLt as libraries: where they are, the functions that programs call, their C types.

Every function returns a status, 0 for success, unless `RESULTS` says otherwise.  A library here is anything
that has functions by name: the real ones, which are the driver's own and the wheels that JAX uses, or a
test's.

Source: the headers cuda.h and cublasLt.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from mpmd.compile.backends.native_gpu.triton.compile_kernels import KernelCompiler, TritonCompiler
from mpmd.compile.backends.target_backend import LoadError
from mpmd.errors import CompileError

_P, _I, _U, _S, _Q = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64

DRIVER: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetName": (_P, _I, _I),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuCtxSetCurrent": (_P,),
    "cuModuleLoadDataEx": (_P, _P, _U, _P, _P),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_P, _P, _P),
    "cuFuncSetAttribute": (_P, _I, _I),
    "cuFuncGetAttribute": (_P, _I, _P),
    "cuMemAlloc_v2": (_P, _S),
    "cuMemFree_v2": (_Q,),
    "cuMemcpyHtoD_v2": (_Q, _P, _S),
    "cuMemHostAlloc": (_P, _S, _U),
    "cuMemHostGetDevicePointer_v2": (_P, _P, _U),
    "cuMemFreeHost": (_P,),
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P),
    "cuMemcpyDtoDAsync_v2": (_Q, _Q, _S, _P),
    "cuMemsetD32Async": (_Q, _U, _S, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _Q, _S, _P),
    "cuStreamCreate": (_P, _U),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuEventCreate": (_P, _U),
    "cuEventRecord": (_P, _P),
    "cuEventElapsedTime": (_P, _P, _P),
    "cuEventDestroy_v2": (_P,),
    "cuStreamBeginCapture_v2": (_P, _I),
    "cuStreamEndCapture": (_P, _P),
    "cuGraphInstantiateWithFlags": (_P, _P, ctypes.c_ulonglong),
    "cuGraphLaunch": (_P, _P),
    "cuGraphDestroy": (_P,),
    "cuGraphExecDestroy": (_P,),
    "cuGetErrorName": (_I, _P),
    "cuGetErrorString": (_I, _P),
}
"""Functions of libcuda → types of their arguments.  Handles are pointers, addresses on a device `uint64`."""

CUBLASLT: dict[str, tuple[Any, ...]] = {
    "cublasLtGetVersion": (),
    "cublasLtGetStatusName": (_I,),
    "cublasLtCreate": (_P,),
    "cublasLtMatmulDescCreate": (_P, _I, _I),
    "cublasLtMatmulDescDestroy": (_P,),
    "cublasLtMatmulDescSetAttribute": (_P, _I, _P, _S),
    "cublasLtMatrixLayoutCreate": (_P, _I, _Q, _Q, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_P,),
    "cublasLtMatrixLayoutSetAttribute": (_P, _I, _P, _S),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulPreferenceDestroy": (_P,),
    "cublasLtMatmulPreferenceSetAttribute": (_P, _I, _P, _S),
    "cublasLtMatmulAlgoGetHeuristic": (_P, _P, _P, _P, _P, _P, _P, _I, _P, _P),
    "cublasLtMatmul": (_P, _P, _P, _Q, _P, _Q, _P, _P, _Q, _P, _Q, _P, _P, _Q, _S, _P),
}
"""Functions of libcublasLt → types of their arguments."""

RESULTS: dict[str, Any] = {"cublasLtGetVersion": _S, "cublasLtGetStatusName": _P}
"""Functions that return something else than a status → its type."""


class FunctionLibrary(Protocol):
    """Functions of C by name."""

    def function(self, name: str) -> Any:
        """A function, a ctypes function with the types that are listed here.

        Raises:
            AttributeError: the library has no such function.
        """


class DeviceError(LoadError):
    """A call of the driver or of cuBLASLt failed."""


class StatusLibrary(ABC):
    """A library whose functions return a status: one that is not 0 becomes an error in words.

    Args:
        library: its functions.
        title: what errors call it.
    """

    def __init__(self, library: FunctionLibrary, title: str) -> None:
        self._library, self._title = library, title

    def function(self, name: str) -> Any:
        """A function of the library.

        Raises:
            DeviceError: it has none of that name.
        """
        try:
            return self._library.function(name)
        except AttributeError as error:
            raise DeviceError(f"{self._title} has no function {name}; it is too old") from error

    def call(self, name: str, *arguments: Any, what: str) -> None:
        """Calls a function.

        Args:
            name: of the function.
            *arguments: of the call.
            what: its purpose, for errors: "loading kernel k".

        Raises:
            DeviceError: its status is not 0.
        """
        self.check(name, int(self.function(name)(*arguments)), what)

    def check(self, name: str, status: int, what: str) -> None:
        if status:
            raise DeviceError(f"{what}: {name} failed: {self.words(status)} (status {status})")

    @abstractmethod
    def words(self, status: int) -> str:
        """A status in the library's words."""


def prototype(name: str) -> Any:
    arguments = DRIVER[name] if name in DRIVER else CUBLASLT[name]
    return ctypes.CFUNCTYPE(RESULTS.get(name, _I), *arguments)


def address(function: Any) -> int:
    """Where a ctypes function is."""
    return ctypes.cast(function, _P).value or 0


_DRIVER = (
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
)
_CUBLASLT = {"13": "libcublasLt.so.13", "12": "libcublasLt.so.12"}
_WHEELS = {"13": "nvidia.cu13", "12": "nvidia.cublas"}
"""Major version of CUDA → the package whose `lib` has the library, as JAX's plugin finds it."""


@dataclasses.dataclass(frozen=True)
class SharedLibrary:
    """A library that was opened.

    Attributes:
        path: by which it was found.
        handle: of ctypes.
    """

    path: str
    handle: Any = dataclasses.field(repr=False, compare=False)

    def function(self, name: str) -> Any:
        """See `FunctionLibrary`."""
        return prototype(name)((name, self.handle))


@dataclasses.dataclass(frozen=True)
class CudaLibraries:
    """The libraries of this process.

    Attributes:
        platform: of JAX, where its handlers are registered.
    """

    platform: str = "CUDA"

    def entry(self, handler: int) -> int:
        """See `GpuLibraries`."""
        return handler

    @property
    def compiler(self) -> KernelCompiler:
        return TritonCompiler()

    @property
    def driver(self) -> FunctionLibrary:
        """The CUDA driver.

        Raises:
            CompileError: there is none.
        """
        return _opened("this machine has no CUDA driver", _DRIVER)

    @property
    def cublaslt(self) -> FunctionLibrary:
        """CuBLASLt, of the same major version as JAX's plugin if that is installed.

        Raises:
            CompileError: there is none.
        """
        missing = 'cuBLASLt, which multiplies matrices, is not installed: pip install "mpmd[gpu]"'
        return _opened(missing, tuple(_places_of_cublaslt()))


@functools.cache
def _opened(missing: str, names: Sequence[str]) -> SharedLibrary:
    tried = []
    for name in names:
        try:
            return SharedLibrary(name, ctypes.CDLL(name))
        except OSError as error:
            tried.append(f"  {error}")
    raise CompileError("\n".join([missing, *tried]))


def _places_of_cublaslt() -> Iterator[str]:
    """Paths in the wheels, then names for the loader, of the plugin's version first."""
    versions = [v for v in _CUBLASLT if importlib.util.find_spec(f"jax_cuda{v}_plugin")] or list(_CUBLASLT)
    for version in versions:
        for folder in _folders(_WHEELS[version]):
            yield str(folder / "lib" / _CUBLASLT[version])
    for version in versions:
        yield _CUBLASLT[version]


def _folders(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the package above it is missing
        return []
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
