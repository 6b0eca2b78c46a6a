"""The GPU target in experiments: fragments compiled for this GPU, or for a stand-in that computes on CPU."""

from __future__ import annotations

import functools
import pkgutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.gpu.experiment import Experiment
from benchmarks.gpu.pack import TravellingPack
from mpmd.compile.backends import targets
from mpmd.compile.backends.jax_function import value_spec
from mpmd.compile.backends.native_gpu.backend import GpuExecutable, NativeGpuBackend
from mpmd.compile.backends.native_gpu.gpu import GpuLibraries, OpenGpu, gpu_at
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.compile.hlo.dtypes import dtype_of
from mpmd.compile.hlo.shape import array
from mpmd.compile.options import CompileOptions


@functools.cache
def libraries(simulated: str) -> GpuLibraries:
    """The driver and cuBLASLt, or those of a stand-in, which `backend="native"` on CPU means then, too."""
    if not simulated:
        return CudaLibraries()
    gpu = pkgutil.resolve_name(simulated)(count=8)
    native: Any = targets.NATIVE
    native["cpu"] = lambda mesh, options: NativeGpuBackend.of(mesh, options, gpu)
    return gpu


ISSUED = CompileOptions(command_buffers=False)
"""Launch by launch, which graphs are compared with."""


def mesh() -> Mesh:
    """The first device."""
    return Mesh(np.array(jax.devices()[:1]), ("data",))


def gpu_of(run: Experiment) -> OpenGpu:
    """The first GPU."""
    return gpu_at(libraries(run.simulated), 0)


def fragment_of(
    name: str, function: Any, arguments: Sequence[Any], donated: Sequence[int] = ()
) -> FragmentModule:
    """A function of arrays as a fragment on a mesh of one device."""

    def spec(value: Any) -> ValueSpec:
        dtype = value_spec(array(dtype_of(np.dtype(value.dtype)))).dtype
        return ValueSpec(tuple(value.shape), dtype, ((),) * len(value.shape))

    shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in arguments]
    text = jax.jit(function, keep_unused=True).lower(*shapes).as_text()
    results = jax.tree.leaves(jax.eval_shape(function, *shapes))
    return FragmentModule(
        name, "mesh", text, tuple(map(spec, shapes)), tuple(map(spec, results)), tuple(donated)
    )


def compiled(run: Experiment, fragment: FragmentModule, options: CompileOptions = ISSUED) -> GpuExecutable:
    """A fragment compiled by the target.

    Raises:
        CompileError: it is not; says why.
    """
    return backend(run, options).compile(fragment, mesh())


def backend(run: Experiment, options: CompileOptions = ISSUED) -> NativeGpuBackend:
    """The target's backend for the first device."""
    return NativeGpuBackend.of(mesh(), options, libraries(run.simulated))


def loaded(run: Experiment, name: str, options: CompileOptions = ISSUED) -> GpuExecutable:
    """A prepared program on the first device.

    Raises:
        CompileError: it does not load.
        FileNotFoundError: it was not prepared.
    """
    on = backend(run, options)
    fragment, made = TravellingPack(run.pack).program(name, on.target)
    return on.load(made, fragment, mesh())


def chained(
    step: Callable[..., Sequence[Any]], state: Sequence[Any], rest: Sequence[Any]
) -> Callable[[], Any]:
    """Calls a step again and again, each time on the arrays that the last call gave for its donated ones."""
    kept = [list(state)]

    def call() -> Any:
        made = step(*kept[0], *rest)
        kept[0] = list(made[: len(state)])
        return made

    return call


def clocks() -> dict[str, str]:
    """Clocks, power and temperature of the GPU now; empty where `nvidia-smi` is not."""
    names = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
    try:
        command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", "--id=0"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names.split(","), (part.strip() for part in said.strip().split(","))))
