"""Fragments of a dry run whose devices are this machine's: compiled, and timed on zeros, one at a time."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.api.aot import Lowered
from mpmd.compile.backends.jax_function import numpy_dtype
from mpmd.compile.compiler import alike, compile_fragments
from mpmd.compile.executable import Executable
from mpmd.compile.fragment import ValueSpec
from mpmd.estimate.fragment_forecast import FragmentForecast
from mpmd.runtime.run.clients import available_cores

_MIN_RUNS, _MAX_RUNS, _SECONDS = 5, 50, 0.3
"""Runs of a fragment, and for how long it is run in all."""


def timed_fragments(
    lowered: Lowered, processes: int, show: Callable[[str, int, int], None]
) -> dict[str, FragmentForecast]:
    """The fragments whose meshes fit into one process, by name.

    Args:
        lowered: the step, on a topology of placeholders.
        processes: how many share the cores of this machine.
        show: reports progress.

    Raises:
        CompileError: a fragment cannot be compiled; names it.
    """
    topology, here = lowered.config.topology, jax.local_devices()
    groups = [
        names
        for names in alike(lowered.fragments, topology)
        if topology[lowered.fragments[names[0]].mesh].size <= len(here)
        and not lowered.fragments[names[0]].callbacks
    ]
    meshes = {
        mesh: Mesh(np.array(here[: topology[mesh].size]).reshape(of.devices.shape), of.axis_names)
        for mesh, of in topology.items()
        if of.size <= len(here)
    }
    cores = available_cores()
    own = cores[: max(1, len(cores) // processes)]
    options = dataclasses.replace(lowered.partitioned.compile_options, cores=dict.fromkeys(meshes, own))
    firsts = {names[0]: lowered.fragments[names[0]] for names in groups}
    executables = compile_fragments(firsts, meshes, lowered.partitioned.backend, options)
    forecasts: dict[str, FragmentForecast] = {}
    for number, names in enumerate(groups):
        show("timing fragments", number, len(groups))
        executable = executables[names[0]]
        seconds = _seconds(executable, meshes[executable.fragment.mesh])
        kept = sum(getattr(executable, "kept_memory", {}).values())
        temporary = getattr(executable, "workspace_bytes", 0)
        devices = meshes[executable.fragment.mesh].size
        forecast = FragmentForecast(seconds, (), temporary, kept // devices, ())
        forecasts.update(dict.fromkeys(names, forecast))
    return forecasts


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
