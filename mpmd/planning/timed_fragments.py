"""Fragments of a dry run whose devices are this machine's: compiled, and timed on zeros, one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.api.aot import Lowered
from mpmd.compile.backends.jax_function import numpy_dtype
from mpmd.compile.compiler import alike, compile_fragments
from mpmd.compile.executable import Executable
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.compile.options import CompileOptions
from mpmd.errors import CompileError
from mpmd.estimate.fragment_forecast import FragmentForecast
from mpmd.runtime.run.clients import available_cores
from mpmd.runtime.run.host_memory import freed_memory

_MIN_RUNS, _MAX_RUNS, _SECONDS = 5, 50, 0.3
"""Runs of a fragment, and for how long it is run in all."""


@dataclasses.dataclass(frozen=True)
class TimedWork:
    """Fragments to compile and run, as a process needs them; it can be pickled.

    Attributes:
        fragments: by name.
        shapes: of their meshes, as axes.
        backend: that compiles them.
        options: of the compiler.
    """

    fragments: Mapping[str, FragmentModule]
    shapes: Mapping[str, Mapping[str, int]]
    backend: str
    options: CompileOptions

    @property
    def devices(self) -> int:
        """How many a process needs."""
        return max((math.prod(shape.values()) for shape in self.shapes.values()), default=1)

    def meshes(self) -> dict[str, Mesh]:
        here = jax.local_devices()
        return {
            name: Mesh(np.array(here[: math.prod(shape.values())]).reshape(*shape.values()), tuple(shape))
            for name, shape in self.shapes.items()
        }

    def executables(self) -> dict[str, Executable]:
        """The fragments, compiled; from now on this process keeps memory that they free, as a job does."""
        if (memory := freed_memory()) is not None:
            memory.allow(TimedWork, 1 << 62)
            memory.trim()
        return compile_fragments(self.fragments, self.meshes(), self.backend, self.options)


def timed_fragments(
    lowered: Lowered, processes: int, show: Callable[[str, int, int], None]
) -> dict[str, FragmentForecast]:
    """The fragments whose meshes fit into one process, by name.

    Cores share caches and memory: while a fragment is timed, other cores of the job are busy with the same
    fragments, in processes of their own.

    Args:
        lowered: the step, on a topology of placeholders.
        processes: how many share the cores of this machine.
        show: reports progress.

    Raises:
        CompileError: a fragment cannot be compiled; names it.
    """
    topology, here = lowered.config.topology, len(jax.local_devices())
    groups = [
        names
        for names in alike(lowered.fragments, topology)
        if topology[lowered.fragments[names[0]].mesh].size <= here
        and not lowered.fragments[names[0]].callbacks
    ]
    shapes = {name: dict(mesh.shape) for name, mesh in topology.items() if mesh.size <= here}
    cores = available_cores()
    own = dict.fromkeys(shapes, cores[: max(1, len(cores) // processes)])
    options = dataclasses.replace(lowered.partitioned.compile_options, cores=own, dump=None)
    firsts = {names[0]: lowered.fragments[names[0]] for names in groups}
    work = TimedWork(firsts, shapes, lowered.partitioned.backend, options)
    forecasts: dict[str, FragmentForecast] = {}
    with _neighbours(work, min(len(cores), processes) - 1) as all_compiled:
        meshes, executables = work.meshes(), work.executables()
        all_compiled()
        for number, names in enumerate(groups):
            show("timing fragments", number, len(groups))
            executable = executables[names[0]]
            mesh = meshes[executable.fragment.mesh]
            kept = sum(getattr(executable, "kept_memory", {}).values()) // mesh.size
            temporary = getattr(executable, "workspace_bytes", 0)
            forecast = FragmentForecast(_seconds(executable, mesh), (), temporary, kept, ())
            forecasts.update(dict.fromkeys(names, forecast))
    return forecasts


@contextlib.contextmanager
def _neighbours(work: TimedWork, count: int) -> Iterator[Callable[[], None]]:
    """Processes that run the same fragments all the time; yields a function that waits until they do."""
    command = [sys.executable, "-m", __name__]
    with contextlib.ExitStack() as ended:
        children = []
        for _ in range(count):
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ended.callback(child.wait)
            ended.callback(child.kill)
            assert child.stdin is not None
            with child.stdin as given:
                pickle.dump(work, given)
            children.append(child)

        def all_compiled() -> None:
            for child in children:
                assert child.stdout is not None
                if not child.stdout.read(1):
                    raise CompileError("a process that runs fragments beside the timed ones has ended")

        yield all_compiled


def keep_busy(work: TimedWork) -> None:
    """Compiles fragments, reports that, and runs them in turns as long as the parent process lives."""
    meshes, parent = work.meshes(), os.getppid()
    executables = work.executables()
    os.write(1, b"!")
    while True:
        for executable in executables.values():
            if os.getppid() != parent:
                return
            _seconds(executable, meshes[executable.fragment.mesh])


def _seconds(executable: Executable, mesh: Mesh) -> float:
    """The median seconds of a call, from when its arguments are there to when its results are."""
    fragment = executable.fragment
    kept = [_zeros(spec, mesh) for spec in fragment.arguments]
    samples: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(samples) <= _MIN_RUNS or (time.perf_counter() < until and len(samples) < _MAX_RUNS):
        given = list(kept)
        for k in fragment.donated:
            given[k] = _zeros(fragment.arguments[k], mesh)
        jax.block_until_ready(given)
        begin = time.perf_counter()
        jax.block_until_ready(executable(*given))
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[1:])


def _zeros(spec: ValueSpec, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec.spec)))
    return jax.device_put(np.zeros(spec.shape, numpy_dtype(spec.dtype)), sharding)


if __name__ == "__main__":
    given: TimedWork = pickle.load(sys.stdin.buffer)
    jax.config.update("jax_num_cpu_devices", given.devices)
    keep_busy(given)
