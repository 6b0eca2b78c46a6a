"""Launches of whole programs on a GPU without XLA: kernels, products of the library, copies; as one graph."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

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
from mpmd.compile.backends.native_gpu.tuning.tune import DeviceRuns, Issue, repeated

_THREAD_LOCAL = 1  # of CUstreamCaptureMode
_MAX_REPEATS, _WORKSPACE = 200, 64 << 20


class ProgramRuns(DeviceRuns):
    """A GPU, and steps of programs on it."""

    def __init__(self, gpu: OpenGpu, undo: contextlib.ExitStack) -> None:
        super().__init__(gpu, undo)
        self._products: dict[ProductDescriptor, Any] = {}

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

    def microseconds(self, issue: Issue, seconds: float = 0.01) -> float:
        """Of one, from many that follow each other; the least of three times that."""
        issue(None)
        (once,) = self.between([repeated(issue, 2)])
        times = max(1, min(_MAX_REPEATS, round(2e6 * seconds / max(once, 0.1))))
        return min(found / times for found in self.between([repeated(issue, times)] * 3))

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
def device_runs(gpu: OpenGpu) -> Iterator[ProgramRuns]:
    """Launches on a GPU; what they needed is released at the end."""
    with contextlib.ExitStack() as undo:
        yield ProgramRuns(gpu, undo)


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
