"""Launches on a GPU without XLA: memory with random numbers, kernels, times by events on one stream."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import ml_dtypes
import numpy as np

from mpmd.compile.backends.native_gpu.gpu import OpenGpu
from mpmd.compile.backends.native_gpu.triton.cubin import Cubin
from mpmd.compile.backends.native_gpu.tuning.candidates import CompiledWay
from mpmd.errors import CompileError

_RANDOM = 8 << 20
"""Numbers that repeat."""
_ALIGNED, _PITCH = 256, 4
"""Of arguments; one may be a part of each row of an array that is so many times as large."""
_FLOATS = {
    "*bf16": np.dtype(ml_dtypes.bfloat16), "*fp16": np.dtype(np.float16), "*fp32": np.dtype(np.float32),
    "*fp64": np.dtype(np.float64),
}  # fmt: skip
_WHAT = "memory of measurements"
Issue = Callable[[int | None], None]
"""Gives something to a stream; None is the driver's own."""


class DeviceRuns:
    """A GPU, and kernels, memory and events on it, which are released with `undo`.

    With a stand-in all of it is called in the same way; its times are those of its clock.
    """

    def __init__(self, gpu: OpenGpu, undo: contextlib.ExitStack) -> None:
        self.gpu, self.driver, self._undo = gpu, gpu.driver, undo
        self.driver.enter()
        self._kernels: dict[tuple[str, int], int] = {}
        self._events: list[ctypes.c_void_p] = []

    # -- memory
    def memory(self, size: int, data: bytes | None = None) -> int:
        """The address of some bytes, which begin with `data`; random ones without."""
        found = ctypes.c_uint64()
        self.driver.call("cuMemAlloc_v2", ctypes.byref(found), max(size, 1), what=_WHAT)
        self._undo.callback(self.driver.function("cuMemFree_v2"), found.value)
        self.fill(found.value, size if data is None else min(size, len(data)), data)
        return found.value

    def fill(self, address: int, size: int, data: bytes | None = None) -> None:
        """Copies bytes to the GPU, random ones again and again."""
        given = random_numbers() if data is None else data
        for at in range(0, size, max(1, len(given))):
            part = min(len(given), size - at)
            self.driver.call("cuMemcpyHtoD_v2", address + at, given[:part], part, what=_WHAT)
        self.wait()

    def content(self, address: int, size: int) -> bytes:
        """Bytes of the GPU."""
        found = ctypes.create_string_buffer(size)
        self.driver.call("cuMemcpyDtoHAsync_v2", found, address, size, None, what="reading results")
        self.wait()
        return found.raw

    def zeros(self, size: int) -> int:
        """The address of some bytes that are zero, four at least."""
        words = -(-max(size, 1) // 4)
        found = self.memory(4 * words, b"")
        self.driver.call("cuMemsetD32Async", found, 0, words, None, what=_WHAT)
        return found

    def wait(self) -> None:
        """Until everything is done."""
        self.driver.call("cuStreamSynchronize", None, what="running launches")

    def works(self) -> bool:
        """Whether the GPU's context still runs anything: after some errors it does not."""
        try:
            self.wait()
        except CompileError:
            return False
        return True

    # -- launches
    def kernel(self, cubin: Cubin) -> int:
        """A kernel, loaded once."""
        key = (cubin.name, hash(cubin.code))
        if key not in self._kernels:
            self._kernels[key] = self.driver.kernel(cubin, self._undo)
        return self._kernels[key]

    def launch(self, cubin: Cubin, grid: int, addresses: Sequence[int]) -> Issue:
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


def repeated(issue: Issue, times: int) -> Issue:
    def start(stream: int | None) -> None:
        for _ in range(times):
            issue(stream)

    return start


class RandomArguments:
    """Memory for the arguments of a kernel in several ways: numbers, and zeros where they are integers.

    Args:
        runs: where.
        ways: that it has room for.
    """

    def __init__(self, runs: DeviceRuns, ways: Iterable[CompiledWay]) -> None:
        self._runs = runs
        self._size = max(sum(map(_room, _arrays(way).values())) for way in ways)
        self._numbers, self._zeros = runs.memory(self._size), runs.zeros(self._size)

    def issue(self, way: CompiledWay) -> Issue:
        """The launches of a way; its arguments follow each other."""
        places = self._places(way)
        issues = []
        for launch in way.launches:
            addresses = [
                (self._numbers if pointer in _FLOATS else self._zeros) + places[operand]
                for operand, pointer in zip(launch.operands, launch.pointers, strict=True)
            ]
            issues.append(self._runs.launch(launch.cubin, launch.grid, addresses))

        def issue(stream: int | None) -> None:
            for each in issues:
                each(stream)

        return issue

    def results(self, way: CompiledWay, issue: Issue) -> dict[int, np.ndarray]:
        """The floats that the last launch of a way leaves, by operand, from the same numbers each time."""
        self._runs.fill(self._numbers, self._size)
        self._runs.wait()
        issue(None)
        places, last = self._places(way), way.launches[-1]
        return {
            operand: np.frombuffer(
                self._runs.content(self._numbers + places[operand], size), _FLOATS[pointer]
            ).astype(np.float64 if pointer == "*fp64" else np.float32)
            for operand, size, pointer in zip(last.operands, last.sizes, last.pointers, strict=True)
            if operand in last.writes and pointer in _FLOATS
        }

    def _places(self, way: CompiledWay) -> dict[int, int]:
        arrays = _arrays(way)
        ends = itertools.accumulate(map(_room, arrays.values()), initial=0)
        return dict(zip(arrays, ends))


def _arrays(way: CompiledWay) -> dict[int, int]:
    """The operands of all launches → bytes; arrays of partial sums, whose sizes differ, are the last."""
    found: dict[int, int] = {}
    for launch in way.launches:
        for operand, size in zip(launch.operands, launch.sizes, strict=True):
            found[operand] = max(size, found.get(operand, 0))
    return dict(sorted(found.items()))


def _room(size: int) -> int:
    return -(-_PITCH * size // _ALIGNED) * _ALIGNED


@functools.cache
def random_numbers() -> bytes:
    """Words that are floats, and so are their halves: normal in bf16 and in f32."""
    return np.random.default_rng(0).standard_normal(_RANDOM).astype(ml_dtypes.bfloat16).tobytes()
