"""The GPUs that this process can use: each with the driver, its context, and cuBLASLt once it is needed."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Protocol

from mpmd.compile.backends.native_gpu.cublaslt import MatrixLibrary
from mpmd.compile.backends.native_gpu.cuda_driver import GpuDriver
from mpmd.compile.backends.native_gpu.gpu_devices import GpuModel, gpu_model
from mpmd.compile.backends.native_gpu.libraries import FunctionLibrary
from mpmd.compile.backends.native_gpu.triton.compile_kernels import KernelCompiler
from mpmd.errors import CompileError
from mpmd.support.resources import once

MIN_DRIVER = 12000
"""Version of CUDA that the driver must know at least: cubins of Triton's are of 12."""


class GpuLibraries(Hashable, Protocol):
    """Where functions come from: `CudaLibraries`, or what a test puts in its place."""

    @property
    def platform(self) -> str:
        """The platform of XLA that runs the programs: `"CUDA"`."""

    @property
    def driver(self) -> FunctionLibrary:
        """The CUDA driver.

        Raises:
            CompileError: there is none.
        """

    @property
    def cublaslt(self) -> FunctionLibrary:
        """CuBLASLt.

        Raises:
            CompileError: there is none.
        """

    def entry(self, handler: int) -> int:
        """The address that XLA calls for the handler at an address: the same."""

    @property
    def compiler(self) -> KernelCompiler:
        """What compiles kernels."""


class OpenGpu:
    """A GPU.

    Args:
        libraries: the driver's and cuBLASLt's functions.
        ordinal: its number among those that the process sees.

    Attributes:
        driver: the driver, for it.
        model: what it is.

    Raises:
        CompileError: there is no driver, a call of it failed, or it is a GPU that is not known.
    """

    def __init__(self, libraries: GpuLibraries, ordinal: int) -> None:
        self.libraries = libraries
        self.driver = GpuDriver(libraries.driver, ordinal)
        if self.driver.version < MIN_DRIVER:
            version = self.driver.version
            raise CompileError(
                f"the CUDA driver is too old: it knows CUDA {version // 1000}.{version % 1000 // 10}; "
                f"kernels need {MIN_DRIVER // 1000}.{MIN_DRIVER % 1000 // 10}"
            )
        self.model: GpuModel = gpu_model(self.driver.name, self.driver.capability).of(self.driver.facts)

    @functools.cached_property
    def cublaslt(self) -> MatrixLibrary:
        """CuBLASLt, with a handle for this GPU.

        Raises:
            CompileError: it is not installed, or does not start.
        """
        self.driver.enter()
        return MatrixLibrary(self.libraries.cublaslt)


@once
def gpu_at(libraries: GpuLibraries, ordinal: int) -> OpenGpu:
    """A GPU by its number; once it was found it stays."""
    return OpenGpu(libraries, ordinal)
