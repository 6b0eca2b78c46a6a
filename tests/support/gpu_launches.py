"""Launch programs on a stand-in GPU: loaded as on a real one, and called as XLA calls them.

All memory that holds no argument begins as NaN or -1.  Kernels that leave the slices of their arguments, and
copies and products that leave the buffers, are errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from examples.workloads.call_frame import CallFrame
from mpmd.compile.backends.jax_function import numpy_dtype
from mpmd.compile.backends.native_gpu.calls import STATE
from mpmd.compile.backends.native_gpu.gpu import OpenGpu
from mpmd.compile.backends.native_gpu.launches import KernelLaunch, LaunchProgram
from mpmd.compile.backends.native_gpu.loading import LoadedGpuProgram
from mpmd.compile.backends.native_gpu.target import GpuCode, gpu_code
from mpmd.compile.fragment import FragmentModule
from tests.support.poison import POISON
from tests.support.simulated_gpu import STREAM, StandInCompiler, StandInGpu


def code_of(program: LaunchProgram) -> GpuCode:
    """A program with code that a stand-in runs."""
    return gpu_code(program, StandInCompiler().compile(program.kernels, 90, None))


class CalledProgram:
    """A program that a stand-in has loaded.

    Attributes:
        gpu: the stand-in; `calls` are those of loading, too, until they are cleared.
        opened: the stand-in as programs see it.
        loaded: the program.
    """

    def __init__(self, program: LaunchProgram, gpu: StandInGpu | None = None, **options: bool) -> None:
        self.program, self.gpu = program, gpu or StandInGpu()
        self.opened = OpenGpu(self.gpu, 0)
        self.loaded = LoadedGpuProgram(code_of(program), self.opened, **options)
        self.function = self.loaded.function
        self.gpu.calls.clear()
        self._addresses: list[int] = []

    def call(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The bytes of the results, from the arguments' bytes; in the same memory as before.

        Raises:
            RuntimeError: the handler ended with an error.
        """
        allocations = self.program.allocations
        kinds = ("parameter", "result", "constant", "arena")
        assert [a.kind for a in allocations] == sorted((a.kind for a in allocations), key=kinds.index)
        if not self.gpu.buffers:
            self.gpu.buffers = [_memory(a.size, a.kind, n) for n, a in enumerate(allocations[:-2])]
            self.gpu.buffers.append(_memory(self.loaded.arena_bytes, "arena", 0))
        for buffer in self.gpu.buffers:
            buffer[:] = POISON
        for buffer, data in zip(self.gpu.buffers, arguments):
            buffer[: data.size] = data
        given = [b.ctypes.data for b in self.gpu.buffers]
        self.gpu.extents = self._extents(given)
        frame = CallFrame(given[: len(arguments)], given[len(arguments) :], stream=STREAM)
        worked = frame.run(self)
        if self.gpu.broken:
            raise self.gpu.broken[0]
        if not worked:
            raise RuntimeError(frame.errors[0])
        buffers = dict(enumerate(self.gpu.buffers[:-1])) | {len(allocations) - 1: self.gpu.buffers[-1]}
        return [buffers[p.allocation][p.offset : p.offset + p.size] for p in self.program.results]

    def _extents(self, given: Sequence[int]) -> dict[tuple[str, int, tuple[int, ...]], tuple[int, ...]]:
        """Bytes of the arguments of each launch."""
        constants, found = self.loaded.state[STATE.index("constants")], {}
        places = [*given[:-1], constants, given[-1]]
        for step in self.program.launches():
            if isinstance(step, KernelLaunch):
                addresses = tuple(places[s.allocation] + s.offset for s in step.arguments)
                sizes = tuple(s.size for s in step.arguments)
                key = step.kernel, step.grid, addresses
                before = found.setdefault(key, sizes)
                found[key] = tuple(map(min, before, sizes))
        return found

    def move(self) -> None:
        """The next call has its arguments and results elsewhere."""
        self.kept, self.gpu.buffers = self.gpu.buffers, []


def _memory(size: int, kind: str, number: int) -> np.ndarray:
    """Memory as XLA gives it: what it allocates at 128 bytes, what callers may bring at 16."""
    data = np.empty(max(size, 1) + 256, np.uint8)
    begin = -data.ctypes.data % 128
    if kind in ("parameter", "result"):
        begin += 16 * (1 + 2 * number % 8)
    return data[begin:][: max(size, 1)]


def run_program(
    program: LaunchProgram, fragment: FragmentModule, arguments: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The results of a fragment's program."""
    given = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arguments]
    results = CalledProgram(program).call(given)
    return [
        made.view(numpy_dtype(value.dtype)).reshape(value.shape)
        for made, value in zip(results, fragment.results, strict=True)
    ]
