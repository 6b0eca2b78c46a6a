"""Launches on a GPU without XLA: memory with random numbers, kernels and products, times by events.

With a stand-in all of it is called in the same way; its times are those of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpmd.compile.backends.native_gpu.gpu import OpenGpu
from mpmd.compile.backends.native_gpu.launches import (
    CopyLaunch,
    FillLaunch,
    KernelLaunch,
    ProductLaunch,
    SimpleStep,
)
from mpmd.compile.backends.native_gpu.loading import PARAMETER_ALIGNMENT
from mpmd.compile.backends.native_gpu.products import ProductDescriptor
from mpmd.compile.backends.native_gpu.target import GpuCode
from mpmd.compile.backends.native_gpu.triton.cubin import Cubin

RANDOM = 8 << 20  # numbers that repeat
_THREAD_LOCAL = 1  # of CUstreamCaptureMode
_MAX_REPEATS, _WORKSPACE = 200, 64 << 20
Issue = Callable[[int | None], None]
"""Gives something to a stream; None is the driver's own."""


class DeviceRuns:
    """A GPU, and kernels, memory and events on it, which are released with `undo`."""

    def __init__(self, gpu: OpenGpu, undo: contextlib.ExitStack) -> None:
        self.gpu, self.driver, self._undo = gpu, gpu.driver, undo
        self.driver.enter()
        self._products: dict[ProductDescriptor, Any] = {}
        self._kernels: dict[Any, int] = {}
        self._events: list[ctypes.c_void_p] = []

    # -- memory
    def memory(self, size: int, data: bytes | None = None) -> int:
        """The address of some bytes, which begin with `data`; random ones without."""
        found, what = ctypes.c_uint64(), "memory of an experiment"
        self.driver.call("cuMemAlloc_v2", ctypes.byref(found), max(size, 1), what=what)
        self._undo.callback(self.driver.function("cuMemFree_v2"), found.value)
        self.fill(found.value, size, _numbers() if data is None else data, repeat=data is None)
        return found.value

    def zeros(self, size: int) -> int:
        """The address of some bytes that are zero, four at least."""
        words = -(-max(size, 1) // 4)
        found = self.memory(4 * words, b"")
        self.driver.call("cuMemsetD32Async", found, 0, words, None, what="memory of an experiment")
        return found

    def fill(self, address: int, size: int, data: bytes, *, repeat: bool) -> None:
        """Copies bytes to the GPU, once or again and again."""
        what = "memory of an experiment"
        for at in range(0, size if repeat else min(size, len(data)), max(1, len(data))):
            part = min(len(data), size - at)
            self.driver.call("cuMemcpyHtoD_v2", address + at, data[:part], part, what=what)
        self.wait()

    def wait(self) -> None:
        """Until everything is done."""
        self.driver.call("cuStreamSynchronize", None, what="running launches")

    # -- launches
    def kernel(self, cubin: Cubin) -> int:
        """A kernel, loaded once."""
        key = (cubin.name, hash(cubin.code))
        if key not in self._kernels:
            self._kernels[key] = self.driver.kernel(cubin, self._undo)
        return self._kernels[key]

    def launch(self, cubin: Cubin, grid: int, addresses: Sequence[int]) -> Issue:
        """A launch of a kernel."""
        kernel = self.kernel(cubin)
        values = (ctypes.c_uint64 * (len(addresses) + 2))(*addresses, 0, 0)
        first = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(values))(*(first + 8 * k for k in range(len(values))))
        shape = (grid, 1, 1, cubin.threads, 1, 1, cubin.shared_bytes)

        def issue(stream: int | None) -> None:
            assert values  # the pointers are to them
            self.driver.call(
                "cuLaunchKernel", kernel, *shape, stream, pointers, None, what=f"running {cubin.name}"
            )

        return issue

    def product(self, descriptor: ProductDescriptor, a: int, b: int, d: int, shift: int = 0) -> Issue:
        """A call of the library, with its first choice of an algorithm; what it adds to a matrix is there."""
        library = self.gpu.cublaslt
        if descriptor not in self._products:
            self._products[descriptor] = library.prepare(descriptor, PARAMETER_ALIGNMENT, self._undo)
        made = self._products[descriptor]
        words, size, work = made.words, made.workspace_bytes, self._workspace
        first, second = (a, b) if descriptor.d.transposed else (b, a)
        factors = [words["alpha"], first, words["a"], second, words["b"]]
        given = [words["handle"], words["descriptor"], *factors, words["beta"], d, words["c"], d, words["d"]]
        given += [words["algorithm"], work, size]

        def issue(stream: int | None) -> None:
            assert made.kept  # their addresses are among the words
            if descriptor.shifts:
                library.shift(made, shift)
            library.call("cublasLtMatmul", *given, stream, what=f"running {descriptor}")

        return issue

    @functools.cached_property
    def _workspace(self) -> int:
        return self.memory(_WORKSPACE)

    def step(self, code: GpuCode, step: SimpleStep, memory: Sequence[int]) -> Issue:
        """A step of a program whose allocations are at some addresses."""
        call = self.driver.call
        if isinstance(step, KernelLaunch):
            places = [memory[s.allocation] + s.offset for s in step.arguments]
            return self.launch(code.cubins[step.kernel], step.grid, places)
        if isinstance(step, ProductLaunch):
            a, b, d, shift = (
                memory[s.allocation] + s.offset for s in (step.a, step.b, step.d, step.shift or step.b)
            )
            return self.product(step.descriptor, a, b, d, shift)
        what, at = f"running {step.name}", memory[step.target.allocation] + step.target.offset
        if isinstance(step, CopyLaunch):
            source, size = memory[step.source.allocation] + step.source.offset, step.source.size
            return lambda stream: call("cuMemcpyDtoDAsync_v2", at, source, size, stream, what=what)
        assert isinstance(step, FillLaunch)
        return lambda stream: call(
            "cuMemsetD32Async", at, step.word, step.target.size // 4, stream, what=what
        )

    # -- times
    def between(self, issues: Sequence[Issue]) -> list[float]:
        """Microseconds of each, between events on one stream; each has the event's own, about one."""
        while len(self._events) <= len(issues):
            event = ctypes.c_void_p()
            self.driver.call("cuEventCreate", ctypes.byref(event), 0, what="an event")
            self._undo.callback(self.driver.function("cuEventDestroy_v2"), event)
            self._events.append(event)
        self._record(0)
        for number, issue in enumerate(issues, 1):
            issue(None)
            self._record(number)
        self.wait()
        return [self._elapsed(k) for k in range(len(issues))]

    def _record(self, number: int) -> None:
        self.driver.call("cuEventRecord", self._events[number], None, what="an event")

    def _elapsed(self, number: int) -> float:
        found = ctypes.c_float()
        ends = self._events[number], self._events[number + 1]
        self.driver.call("cuEventElapsedTime", ctypes.byref(found), *ends, what="a time between events")
        return 1e3 * found.value

    def microseconds(self, issue: Issue, seconds: float = 0.01) -> float:
        """Of one, from many that follow each other; the least of three times that."""

        def many(times: int) -> Issue:
            def start(stream: int | None) -> None:
                for _ in range(times):
                    issue(stream)

            return start

        issue(None)
        (once,) = self.between([many(2)])
        times = max(1, min(_MAX_REPEATS, round(2e6 * seconds / max(once, 0.1))))
        return min(found / times for found in self.between([many(times)] * 3))

    def captured(self, issues: Sequence[Issue]) -> Issue:
        """All of them as one graph, captured on a stream of its own."""
        call, what, stream = self.driver.call, "capturing launches", self.driver.stream(self._undo)
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL, what=what)
        for issue in issues:
            issue(stream)
        call("cuStreamEndCapture", stream, ctypes.byref(graph), what=what)
        self._undo.callback(self.driver.function("cuGraphDestroy"), graph)
        call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0, what=what)
        self._undo.callback(self.driver.function("cuGraphExecDestroy"), made)
        return lambda on: call("cuGraphLaunch", made, on, what="running a graph")


@contextlib.contextmanager
def device_runs(gpu: OpenGpu) -> Iterator[DeviceRuns]:
    """Launches on a GPU; what they needed is released at the end."""
    with contextlib.ExitStack() as undo:
        yield DeviceRuns(gpu, undo)


def on_host(runs: DeviceRuns, issues: Sequence[Issue], repeats: int) -> dict[str, float]:
    """Microseconds until the host has issued all, and until they are done; medians."""
    issued, done = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        for issue in issues:
            issue(None)
        issued.append(time.perf_counter() - begin)
        runs.wait()
        done.append(time.perf_counter() - begin)
    return {
        "issued_us": round(1e6 * statistics.median(issued), 2),
        "done_us": round(1e6 * statistics.median(done), 2),
    }


@functools.cache
def _numbers() -> bytes:
    """Words that are floats, and so are their halves: normal in bf16 and in f32."""
    import ml_dtypes

    return np.random.default_rng(0).standard_normal(RANDOM).astype(ml_dtypes.bfloat16).tobytes()
