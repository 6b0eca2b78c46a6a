"""Where the CUDA driver and cuBLASLt are: the driver's own library, and the wheels that JAX uses."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpmd.compile.backends.native_gpu.functions import FunctionLibrary, prototype
from mpmd.compile.backends.native_gpu.triton.compiler import KernelCompiler, TritonCompiler
from mpmd.errors import CompileError

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
    """Paths in the wheels, then names that the loader looks up, those of the plugin's version first."""
    versions = [v for v in _CUBLASLT if importlib.util.find_spec(f"jax_cuda{v}_plugin")] or list(_CUBLASLT)
    for version in versions:
        for folder in _folders(_WHEELS[version]):
            yield str(folder / "lib" / _CUBLASLT[version])
    for version in versions:
        yield _CUBLASLT[version]


def _folders(package: str) -> list[Path]:
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the package above it is missing
        return []
    places = found.submodule_search_locations if found is not None else None
    return [Path(place) for place in places or ()]
