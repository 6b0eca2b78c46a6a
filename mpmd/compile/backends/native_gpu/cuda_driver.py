"""The CUDA driver on one GPU: contexts, kernels, memory.

Everything that is created is released when the `ExitStack` is closed that was given for it.  That waits for
the whole GPU: what programs leave behind is kept until the next one is loaded, since any thread may end one.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from mpmd.compile.backends.native_gpu.gpu_devices import GpuFacts
from mpmd.compile.backends.native_gpu.libraries import DeviceError, FunctionLibrary, StatusLibrary
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin

_JIT_ERROR_LOG_BUFFER, _JIT_ERROR_LOG_BUFFER_BYTES = 5, 6  # of CUjit_option
_LOG_BYTES = 8192
_MAX_DYNAMIC_SHARED_BYTES = 8  # of CUfunction_attribute
_PLAIN_SHARED_BYTES = 48 << 10
"""Shared memory that every kernel may have; one that needs more must be given leave."""

_REGISTERS = 4  # of CUfunction_attribute
_NON_BLOCKING = 1  # of CUstream_flags: it does not wait for the driver's own stream
_CAPABILITY = (75, 76)  # of CUdevice_attribute: its major and minor number
_MULTIPROCESSORS, _L2_BYTES, _SHARED_BYTES = 16, 38, 97  # of CUdevice_attribute
_KILOHERTZ, _MEMORY_KILOHERTZ, _MEMORY_BITS = 13, 36, 37
_NAME_BYTES = 256
_MAPPED = 2  # of the flags of cuMemHostAlloc: the GPU has an address of it


class GpuDriver(StatusLibrary):
    """The driver of a process, with one GPU.

    Args:
        library: its functions.
        ordinal: number of the GPU among those that the process sees.

    Raises:
        DeviceError: a call failed.
    """

    def __init__(self, library: FunctionLibrary, ordinal: int) -> None:
        super().__init__(library, "the CUDA driver")
        self.ordinal = ordinal
        self._left = collections.deque[contextlib.ExitStack]()
        self.call("cuInit", 0, what="starting the CUDA driver")
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal, what=f"finding GPU {ordinal}")
        self._device = device.value

    def words(self, status: int) -> str:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if self.function(name)(status, ctypes.byref(text)) == 0 and text.value:
                texts.append(text.value.decode(errors="replace"))
        return ": ".join(texts) or "unknown error"

    # -- the device
    @functools.cached_property
    def name(self) -> str:
        """Such as "NVIDIA H100 80GB HBM3"."""
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGetName", text, _NAME_BYTES, self._device, what="naming the GPU")
        return text.value.decode(errors="replace")

    @functools.cached_property
    def capability(self) -> int:
        """Its compute capability without the dot: 90."""
        major, minor = map(self._attribute, _CAPABILITY)
        return 10 * major + minor

    @functools.cached_property
    def facts(self) -> GpuFacts:
        """What it is made of: boards and slices of one name differ."""
        return GpuFacts(
            units=self._attribute(_MULTIPROCESSORS),
            clock=1e3 * self._attribute(_KILOHERTZ),
            l2_bytes=self._attribute(_L2_BYTES),
            shared_bytes=self._attribute(_SHARED_BYTES),
            # of double data rate
            bandwidth=2e3 * self._attribute(_MEMORY_KILOHERTZ) * self._attribute(_MEMORY_BITS) / 8,
        )

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        given = (ctypes.byref(value), number, self._device)
        self.call("cuDeviceGetAttribute", *given, what="describing the GPU")
        return value.value

    @functools.cached_property
    def version(self) -> int:
        """The newest version of CUDA that it knows: 13000 for 13.0."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value), what="the version of the driver")
        return value.value

    @functools.cached_property
    def context(self) -> int:
        """The primary context, which is also XLA's; it is kept for the life of the process."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device, what="the GPU's context")
        return context.value or 0

    def enter(self) -> None:
        self.call("cuCtxSetCurrent", self.context, what="the GPU's context")

    # -- kernels, streams, memory
    def kernel(self, cubin: Cubin, undo: contextlib.ExitStack) -> int:
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG_BUFFER, _JIT_ERROR_LOG_BUFFER_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        what = f"loading kernel {cubin.name}"
        with _with_log(log):
            self.call("cuModuleLoadDataEx", ctypes.byref(module), cubin.code, 2, options, values, what=what)
        undo.callback(self._release, "cuModuleUnload", module)
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, cubin.name.encode(), what=what)
        # The attribute is of the function, so once for all launches.
        if cubin.shared_bytes > _PLAIN_SHARED_BYTES:
            self.call(
                "cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, cubin.shared_bytes,
                what=f"giving kernel {cubin.name} {cubin.shared_bytes} bytes of shared memory",
            )  # fmt: skip
        # a kernel that is loaded at its first launch makes that wait for the whole GPU
        self.call("cuFuncGetAttribute", ctypes.byref(ctypes.c_int()), _REGISTERS, function, what=what)
        return function.value or 0

    def stream(self, undo: contextlib.ExitStack, what: str = "a stream for captures") -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING, what=what)
        undo.callback(self._release, "cuStreamDestroy_v2", stream)
        return stream.value or 0

    def memory(self, data: bytes, undo: contextlib.ExitStack, kind: str = "constants") -> int:
        """The address of a copy of some bytes on the GPU."""
        address, what = ctypes.c_uint64(), f"copying {len(data)} bytes of {kind} to the GPU"
        self.call("cuMemAlloc_v2", ctypes.byref(address), len(data), what=what)
        undo.callback(self._release, "cuMemFree_v2", address.value)
        self.write(address.value, data, what)
        return address.value

    def write(self, at: int, data: bytes, what: str) -> None:
        """Copies bytes to memory of the GPU; all later work has them."""
        self.call("cuMemcpyHtoD_v2", at, data, len(data), what=what)
        # it may return before the copy is on the GPU, and XLA's stream does not wait for the driver's own
        self.call("cuStreamSynchronize", None, what=what)

    def mapped(self, size: int, undo: contextlib.ExitStack) -> tuple[Any, int]:
        """Zeros in memory of the host that the GPU writes to, as the host and as the GPU address it."""
        host, there, what = ctypes.c_void_p(), ctypes.c_uint64(), f"{size} bytes for times"
        self.call("cuMemHostAlloc", ctypes.byref(host), size, _MAPPED, what=what)
        undo.callback(self._release, "cuMemFreeHost", host)
        ctypes.memset(host, 0, size)
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), host, 0, what=what)
        return (ctypes.c_uint64 * (size // 8)).from_address(host.value or 0), there.value

    def leave(self, undo: contextlib.ExitStack) -> None:
        """Has something released when there is time to wait."""
        self._left.append(undo)

    def release(self) -> None:
        while self._left:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._left.popleft().close()

    def _release(self, name: str, handle: Any) -> None:
        """Releases something; its status says nothing that a caller could act on."""
        self.function("cuCtxSetCurrent")(self.context)
        self.function(name)(handle)


@contextlib.contextmanager
def _with_log(log: Any) -> Iterator[None]:
    """Adds the driver's log to the message of an error."""
    try:
        yield
    except DeviceError as error:
        said = log.value.decode(errors="replace").strip()
        if not said:
            raise
        raise DeviceError(f"{error}\n  {said}") from error
