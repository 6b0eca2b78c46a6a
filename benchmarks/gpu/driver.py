"""The CUDA driver, libcuda, by ctypes: contexts, modules, and every error in words.

Nothing here needs CUDA's toolkit or headers; a machine without a driver gets a `GpuError` that says so.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import glob
from collections.abc import Sequence
from typing import Any

_NAMES = (
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib/libcuda.so.1",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
)
# enums of cuda.h
_ATTRIBUTE = {"shared_bytes_optin": 97, "multiprocessors": 16, "l2_bytes": 38, "major": 75, "minor": 76}
_JIT_ERROR_BUFFER, _JIT_ERROR_BUFFER_BYTES = 5, 6
_MAX_DYNAMIC_SHARED_BYTES = 8
_NO_CUDA_STUB = 34  # CUDA_ERROR_STUB_LIBRARY: the toolkit's stand-in for a driver


class GpuError(RuntimeError):
    """A call of the CUDA driver or of cuBLASLt failed, or there is none to call."""


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
    memory_bytes: int
    shared_bytes: int
    driver: int


@functools.cache
def load_driver() -> Driver:
    """The driver of this machine.

    Raises:
        GpuError: there is none, or it finds no GPU.
    """
    tried = []
    for name in _NAMES:
        try:
            return Driver(ctypes.CDLL(name))
        except OSError as error:
            tried.append(f"{name}: {error}")
    raise GpuError("this machine has no CUDA driver:\n  " + "\n  ".join(tried))


def gpu_is_here() -> tuple[bool, str]:
    """Whether there is a GPU that the driver can use; else why not."""
    try:
        facts = load_driver().facts()
    except GpuError as error:
        return False, str(error).partition("\n")[0]
    return True, f"{facts.name} ({facts.arch})"


class Driver:
    """libcuda; see `load_driver`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._modules: list[tuple[ctypes.c_void_p, bytes]] = []  # loaded code lives as long as the process
        status = self.function("cuInit")(0)
        if status == _NO_CUDA_STUB:
            raise OSError("it is the toolkit's stub and no driver")
        self.check(status, "cuInit")
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        if count.value < 1:
            raise GpuError("the CUDA driver finds no GPU")

    def function(self, name: str) -> Any:
        """A function by its name.

        Raises:
            GpuError: this driver has none of that name.
        """
        try:
            found = getattr(self._library, name)
        except AttributeError:
            raise GpuError(f"this CUDA driver has no function {name}; it is too old") from None
        found.restype = ctypes.c_int
        return found

    def address(self, name: str) -> int:
        """The address of a function."""
        return ctypes.cast(self.function(name), ctypes.c_void_p).value or 0

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function; raises a GpuError if it fails."""
        self.check(self.function(name)(*arguments), name)

    def check(self, status: int, what: str) -> None:
        """Raises a GpuError that says in words what a status means."""
        if status:
            raise GpuError(f"{what} failed: {self.words(status)}")

    def words(self, status: int) -> str:
        """A status in words."""
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            found = ctypes.c_char_p()
            if self.function(name)(status, ctypes.byref(found)) == 0 and found.value:
                texts.append(found.value.decode())
        return f"{': '.join(texts) or 'unknown error'} (status {status})"

    def facts(self, ordinal: int = 0) -> DeviceFacts:
        """What a device is."""
        device = self._device(ordinal)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, device)
        values = {}
        for field, number in _ATTRIBUTE.items():
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
            values[field] = value.value
        memory, version = ctypes.c_size_t(), ctypes.c_int()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return DeviceFacts(
            name=name.value.decode(),
            arch=f"sm_{values['major']}{values['minor']}",
            multiprocessors=values["multiprocessors"],
            l2_bytes=values["l2_bytes"],
            memory_bytes=memory.value,
            shared_bytes=values["shared_bytes_optin"],
            driver=version.value,
        )

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def context(self, ordinal: int = 0) -> int:
        """The primary context, which is also XLA's, made current in the calling thread."""
        if ordinal not in self._contexts:
            retained = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(retained), self._device(ordinal))
            self._contexts[ordinal] = retained.value or 0
        self.call("cuCtxSetCurrent", ctypes.c_void_p(self._contexts[ordinal]))
        return self._contexts[ordinal]

    def kernels(self, image: bytes, names: Sequence[str], shared: Sequence[int] = ()) -> list[int]:
        """Loads a cubin, or PTX that the driver compiles, and finds kernels in it.

        Args:
            image: the code.
            names: of kernels.
            shared: bytes of dynamic shared memory of each; 0 for all if left out.

        Raises:
            GpuError: the driver refuses the code (made for another architecture, perhaps), or a name is not
            in it.
        """
        self.context()
        log, module = ctypes.create_string_buffer(8192), ctypes.c_void_p()
        options = (ctypes.c_int * 2)(_JIT_ERROR_BUFFER, _JIT_ERROR_BUFFER_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        terminated = image + b"\0"  # PTX must end so, and a cubin does not mind
        status = self.function("cuModuleLoadDataEx")(ctypes.byref(module), terminated, 2, options, values)
        self.check(
            status, f"loading {', '.join(names)} {log.value.decode(errors='replace').strip()}".rstrip()
        )
        self._modules.append((module, terminated))
        found = []
        for number, name in enumerate(names):
            kernel = ctypes.c_void_p()
            self.check(
                self.function("cuModuleGetFunction")(ctypes.byref(kernel), module, name.encode()),
                f"finding kernel {name}",
            )
            size = shared[number] if shared else 0
            if size > 48 << 10:
                self.check(
                    self.function("cuFuncSetAttribute")(kernel, _MAX_DYNAMIC_SHARED_BYTES, size),
                    f"giving kernel {name} {size} bytes of shared memory",
                )
            found.append(kernel.value or 0)
        return found

    def kernel_facts(self, kernel: int) -> dict[str, int]:
        """Registers of a thread, and bytes that spilled from them."""
        found = {}
        for name, number in (("registers", 4), ("spilled_bytes", 3)):
            value = ctypes.c_int()
            self.call("cuFuncGetAttribute", ctypes.byref(value), number, ctypes.c_void_p(kernel))
            found[name] = value.value
        return found

    def synchronize(self) -> None:
        """Waits for the device; an error of a kernel that ran shows here."""
        self.call("cuCtxSynchronize")


def nvidia_library(soname: str) -> Any:
    """A library of NVIDIA's wheels, or of the system: `nvidia_library("libcublasLt.so")`.

    Raises:
        GpuError: there is none; says where it was looked for.
    """
    places = []
    try:
        import nvidia

        places = list(nvidia.__path__)
    except ImportError:
        pass
    found = [
        path
        for place in places
        for pattern in (f"{place}/cu13/lib/{soname}.*", f"{place}/*/lib/{soname}.*")
        for path in sorted(glob.glob(pattern), reverse=True)
    ]
    tried = []
    for name in [*dict.fromkeys(found), f"{soname}.13", f"{soname}.12", soname]:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name}: {error}")
    raise GpuError(f"{soname} cannot be loaded:\n  " + "\n  ".join(tried))
