"""Measures tiles on this GPU: the kernels that take the longest first, until the time is over.

Nothing runs through XLA: kernels are launched on one stream, in memory with random numbers, and timed by
events.  Ways to compute the same run in turn, several rounds; one is taken if its median is below the median
of the kernel by rules, by more than noise.  The table is written after each kernel, so that an end by force
loses one kernel at most.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from mpmd.compile.backends.native_gpu.gpu import GpuLibraries, OpenGpu, gpu_at
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries, DeviceError
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.choices import (
    OWN,
    MeasuredTiles,
    read_table,
    table_file,
    write_table,
)
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin, shared_workers
from mpmd.compile.backends.native_gpu.tuning.tile_candidates import (
    CompiledWay,
    TileWay,
    TunedKernel,
    compiled,
    tuned_kernels,
)
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule
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

    With a stand-in all of it is called in the same way; its clock gives the times.
    """

    def __init__(self, gpu: OpenGpu, undo: contextlib.ExitStack) -> None:
        self.gpu, self.driver, self._undo = gpu, gpu.driver, undo
        self.driver.enter()
        self._kernels: dict[tuple[str, int], int] = {}
        self._events: list[ctypes.c_void_p] = []

    # -- memory
    def memory(self, size: int, data: bytes | None = None) -> int:
        """The address of some bytes, which begin with `data`; random ones without."""
        address = ctypes.c_uint64()
        self.driver.call("cuMemAlloc_v2", ctypes.byref(address), max(size, 1), what=_WHAT)
        self._undo.callback(self.driver.function("cuMemFree_v2"), address.value)
        self.fill(address.value, size if data is None else min(size, len(data)), data)
        return address.value

    def fill(self, address: int, size: int, data: bytes | None = None) -> None:
        """Copies bytes to the GPU, random ones again and again."""
        given = random_numbers() if data is None else data
        for at in range(0, size, max(1, len(given))):
            part = min(len(given), size - at)
            self.driver.call("cuMemcpyHtoD_v2", address + at, given[:part], part, what=_WHAT)
        self.wait()

    def content(self, address: int, size: int) -> bytes:
        """Bytes of the GPU."""
        buffer = ctypes.create_string_buffer(size)
        self.driver.call("cuMemcpyDtoHAsync_v2", buffer, address, size, None, what="reading results")
        self.wait()
        return buffer.raw

    def zeros(self, size: int) -> int:
        """The address of some bytes that are zero, four at least."""
        words = -(-max(size, 1) // 4)
        address = self.memory(4 * words, b"")
        self.driver.call("cuMemsetD32Async", address, 0, words, None, what=_WHAT)
        return address

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
        milliseconds = ctypes.c_float()
        ends = self._events[number], self._events[number + 1]
        self.driver.call(
            "cuEventElapsedTime", ctypes.byref(milliseconds), *ends, what="a time between events"
        )
        return 1e3 * milliseconds.value


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
    sizes: dict[int, int] = {}
    for launch in way.launches:
        for operand, size in zip(launch.operands, launch.sizes, strict=True):
            sizes[operand] = max(size, sizes.get(operand, 0))
    return dict(sorted(sizes.items()))


def _room(size: int) -> int:
    return -(-_PITCH * size // _ALIGNED) * _ALIGNED


@functools.cache
def random_numbers() -> bytes:
    """Words that are floats, and so are their halves: normal in bf16 and in f32."""
    return np.random.default_rng(0).standard_normal(_RANDOM).astype(ml_dtypes.bfloat16).tobytes()


ROUNDS = 7
_ROUND_US, _MAX_REPEATS = 2000.0, 200
"""How long a way is measured in a round, and how often it is launched in it at most."""
_NOISE = 0.02
"""A way must be faster by this share."""
_ROUNDING = 0.02
"""Of the largest result: bf16 has 8 bits."""


@dataclasses.dataclass(frozen=True)
class TuningTask:
    """Modules to tune, and where the table goes.

    Attributes:
        modules: fragments, and their HLO before any pass, which passes change.
        folder: of the compile cache.
        seconds: after which no other kernel is begun.
        again: whether kernels that are in the table are measured again.
    """

    modules: Sequence[tuple[FragmentModule, HloModule]]
    folder: Path
    seconds: float
    again: bool = False


def tune(task: TuningTask, say: Callable[[str], None], libraries: GpuLibraries | None = None) -> Path:
    """Measures the kernels of some fragments on the first GPU; returns the file of the table.

    Args:
        task: the modules.
        say: is given each line of the report.
        libraries: the driver and what compiles kernels.

    Raises:
        CompileError: there is no GPU here, no compiler, or something has no code.
        OSError: the table cannot be written.
    """
    libraries, end = libraries or CudaLibraries(), time.monotonic() + task.seconds
    if why := libraries.compiler.problem():
        raise CompileError(why)
    work = _Tuning(gpu_at(libraries, 0))
    path = table_file(task.folder, work.gpu.model, libraries.compiler)
    table = read_table(path)
    thunks = [
        t for given in task.modules for t in prepare_fragment(given[0], work.target, module=given[1]).thunks
    ]
    all_kernels = tuned_kernels(thunks, work.gpu.model)
    kernels = all_kernels if task.again else [k for k in all_kernels if k.key not in dict(table.lines)]
    about = f"{work.gpu.driver.name}, {libraries.compiler.key()}"
    say(f"{about}: {len(all_kernels)} kernels, {len(kernels)} of them to measure")
    gained = 0.0
    for us, kernel in sorted(work.own_times(kernels), key=lambda row: -row[0] * row[1].count):
        if time.monotonic() > end:
            say(f"the time is over; the kernels that are left take at most {us:.1f} us each")
            break
        times, wrong = work.times(kernel)
        if OWN not in times:
            continue
        choice = fastest(times)
        table = MeasuredTiles.of([*table.lines, (kernel.key, choice)])
        write_table(path, table, about)
        gained += kernel.count * (times[OWN] - times[choice])
        say(f"{times[OWN]:10.1f} us x{kernel.count:<4} {kernel.key}: {times[choice]:.1f} us by {choice}, "
            f"the best of {len(times)}  // {kernel.name}")  # fmt: skip
        for each in wrong:
            say(f"{'':>10} {each} computes something else; please report it")
    say(f"{gained:.1f} us less; {path}")
    return path


def fastest(times: Mapping[str, float]) -> str:
    """The choice that a table gets, from the times of all: the one by rules if no other is clearly faster."""
    best = min(times, key=lambda choice: times[choice])
    return best if times[best] < (1 - _NOISE) * times[OWN] else OWN


class _Tuning:
    def __init__(self, gpu: OpenGpu) -> None:
        self.gpu = gpu
        self.target = GpuTarget(gpu.model, gpu.libraries.compiler)

    def own_times(self, kernels: Sequence[TunedKernel]) -> list[tuple[float, TunedKernel]]:
        """Microseconds of each by rules; those that do not fit into the GPU's memory are left out."""
        times = []
        for kernel in kernels:
            with self._running(self._compiled(kernel, kernel.ways[:1])) as run:
                times += [(run.times(1)[OWN], kernel)] if run is not None else []
        return times

    def times(self, kernel: TunedKernel) -> tuple[dict[str, float], list[str]]:
        """The choice of each way → its microseconds; and the choices whose results are others.

        Of the ways that are faster than the one by rules results are looked at until one's are right.
        """
        wrong = []
        with self._running(self._compiled(kernel, kernel.ways)) as run:
            if run is None:
                return {}, []
            times = run.times(ROUNDS)
            own = run.results(OWN) if fastest(times) != OWN else {}
            while (choice := fastest(times)) != OWN and not alike(run.results(choice), own):
                wrong.append(choice)
                del times[choice]
        return times, wrong

    def _compiled(self, kernel: TunedKernel, ways: Sequence[TileWay]) -> list[CompiledWay]:
        def one(way: TileWay) -> CompiledWay | None:
            try:
                return compiled(kernel, way, self.target)
            except CompileError:
                if way.choice == OWN:
                    raise
                return None  # the compiler does not take every tile

        with ThreadPoolExecutor(shared_workers().count) as pool:
            return [compiled for compiled in pool.map(one, ways) if compiled is not None]

    @contextlib.contextmanager
    def _running(self, ways: Sequence[CompiledWay]) -> Iterator[_RunningWays | None]:
        """The ways on the GPU, each launched once; None if it has no memory for them.

        Raises:
            DeviceError: a launch failed, and nothing runs any more.
        """
        with contextlib.ExitStack() as undo:
            runs = DeviceRuns(self.gpu, undo)
            try:
                run = _RunningWays(runs, ways)
            except DeviceError:
                if not runs.works():
                    raise
                run = None
            yield run


class _RunningWays:
    def __init__(self, runs: DeviceRuns, ways: Sequence[CompiledWay]) -> None:
        self._runs, self._ways = runs, {way.choice: way for way in ways}
        self._arguments = RandomArguments(runs, ways)
        self._issues = {choice: self._arguments.issue(way) for choice, way in self._ways.items()}
        self._first = [runs.between([issue] * 2)[1] for issue in self._issues.values()]

    def times(self, rounds: int) -> dict[str, float]:
        """Microseconds of each, the median of some rounds in which all take turns."""
        repeats = [max(1, min(_MAX_REPEATS, round(_ROUND_US / max(us, 0.1)))) for us in self._first]
        turn = [repeated(issue, times) for issue, times in zip(self._issues.values(), repeats)]
        columns = zip(*(self._runs.between(turn) for _ in range(rounds)))
        return {c: statistics.median(us) / n for c, us, n in zip(self._issues, columns, repeats)}

    def results(self, choice: str) -> dict[int, np.ndarray]:
        return self._arguments.results(self._ways[choice], self._issues[choice])


def alike(some: Mapping[int, np.ndarray], others: Mapping[int, np.ndarray]) -> bool:
    """Whether results differ by no more than sums in another order do, operand by operand."""
    for operand in some.keys() & others.keys():
        one, other = some[operand], others[operand]
        scale = np.max(np.abs(other), where=np.isfinite(other), initial=0.0)
        if one.shape != other.shape or not np.allclose(one, other, 0.0, _ROUNDING * scale, equal_nan=True):
            return False
    return True
