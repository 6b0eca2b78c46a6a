"""Measures tiles on this GPU: the kernels that take the longest first, until the time is over.

Ways to compute the same run in turn on one stream, several rounds; one is taken if its median is below that
of the kernel by rules by more than noise.  The table is written after each kernel, so that an
end by force loses one kernel at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mpmd.compile.backends.native_gpu.driver import DeviceError
from mpmd.compile.backends.native_gpu.gpu import GpuLibraries, OpenGpu, gpu_at
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.choices import OWN, MeasuredTiles
from mpmd.compile.backends.native_gpu.triton.workers import shared_workers
from mpmd.compile.backends.native_gpu.tuning.candidates import (
    CompiledWay,
    TileWay,
    TunedKernel,
    compiled,
    tuned_kernels,
)
from mpmd.compile.backends.native_gpu.tuning.device_runs import (
    DeviceRuns,
    RandomArguments,
    repeated,
)
from mpmd.compile.backends.native_gpu.tuning.table_file import read_table, table_file, write_table
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule
from mpmd.errors import CompileError

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
    found = tuned_kernels(thunks, work.gpu.model)
    kernels = found if task.again else [k for k in found if k.key not in dict(table.lines)]
    about = f"{work.gpu.driver.name}, {libraries.compiler.key()}"
    say(f"{about}: {len(found)} kernels, {len(kernels)} of them to measure")
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
    """The work on one GPU."""

    def __init__(self, gpu: OpenGpu) -> None:
        self.gpu = gpu
        self.target = GpuTarget(gpu.model, gpu.libraries.compiler)

    def own_times(self, kernels: Sequence[TunedKernel]) -> list[tuple[float, TunedKernel]]:
        """Microseconds of each by rules; those that do not fit into the GPU's memory are left out."""
        found = []
        for kernel in kernels:
            with self._running(self._compiled(kernel, kernel.ways[:1])) as run:
                found += [(run.times(1)[OWN], kernel)] if run is not None else []
        return found

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
            return [made for made in pool.map(one, ways) if made is not None]

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
    """Ways of a kernel on a GPU, on the same arguments."""

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
