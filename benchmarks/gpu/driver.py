"""The CUDA driver for experiments: facts about the GPU, and kernels from any image of code."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from mpmd.compile.backends.native_gpu.cuda_driver import GpuDriver
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries, address
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin
from mpmd.errors import CompileError

_ATTRIBUTE = {"shared_bytes": 97, "multiprocessors": 16, "l2_bytes": 38}  # CUdevice_attribute
_REGISTERS, _LOCAL_BYTES = 4, 3  # CUfunction_attribute


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """What the driver says of a GPU.

    Attributes:
        arch: such as `sm_90`.
        driver: the newest CUDA version that the driver knows, `13000` for 13.0.
    """

    name: str
    arch: str
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int
    driver: int


class ExperimentDriver(GpuDriver):
    """The driver with the first GPU; what it loads lives as long as the process."""

    def __init__(self) -> None:
        super().__init__(CudaLibraries().driver, 0)
        self._kept = contextlib.ExitStack()

    def facts(self) -> DeviceFacts:
        """Its attributes, by the driver."""
        values = {}
        for field, number in _ATTRIBUTE.items():
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), number, 0, what=f"asking for {field}")
            values[field] = value.value
        return DeviceFacts(self.name, f"sm_{self.capability}", driver=self.version, **values)

    def address(self, name: str) -> int:
        """The address of a function."""
        return address(self.function(name))

    def kernels(self, image: bytes, names: Sequence[str], shared: Sequence[int] = ()) -> list[int]:
        """Loads a cubin and finds kernels in it.

        Args:
            image: the code.
            names: of kernels.
            shared: bytes of dynamic shared memory of each; 0 for all if left out.

        Raises:
            CompileError: the driver refuses the code (made for another architecture, perhaps), or a name is
                not in it.
        """
        self.enter()
        cubins = [Cubin(name, image, "", size, 0, 0) for name, size in zip(names, shared or [0] * len(names))]
        return [self.kernel(cubin, self._kept) for cubin in cubins]

    def kernel_facts(self, kernel: int) -> dict[str, int]:
        """Registers of a thread, and bytes that spilled from them."""
        return kernel_facts(self, kernel)


def kernel_facts(driver: Any, kernel: int) -> dict[str, int]:
    """Registers of a thread of a kernel, and bytes of local memory: those that spilled."""
    found = {}
    for name, number in (("registers", _REGISTERS), ("spilled_bytes", _LOCAL_BYTES)):
        value = ctypes.c_int()
        driver.call("cuFuncGetAttribute", ctypes.byref(value), number, kernel, what="describing a kernel")
        found[name] = value.value
    return found


@functools.cache
def load_driver() -> ExperimentDriver:
    """The driver of this machine.

    Raises:
        CompileError: there is none, or it finds no GPU.
    """
    return ExperimentDriver()


def gpu_is_here() -> tuple[bool, str]:
    """Whether there is a GPU that the driver can use; else why not."""
    try:
        facts = load_driver().facts()
    except CompileError as error:
        return False, str(error).partition("\n")[0]
    return True, f"{facts.name} ({facts.arch})"
