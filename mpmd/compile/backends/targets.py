"""The table of targets: the only module outside of a target that imports it.

A new target is a line here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from jax.sharding import Mesh

from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_cpu.ffi import HostStamps
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.backends.native_gpu.backend import NativeGpuBackend
from mpmd.compile.backends.native_gpu.clock import GpuStamps
from mpmd.compile.backends.native_gpu.gpu_devices import GPUS
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.tuning.tune import TuningTask, tune
from mpmd.compile.backends.reference.backend import ReferenceBackend
from mpmd.compile.backends.target_backend import TargetBackend
from mpmd.compile.options import CompileOptions
from mpmd.compile.target import Target

MakeBackend = Callable[[Mesh, CompileOptions], TargetBackend]

NATIVE: Mapping[str, MakeBackend] = {
    "cpu": lambda mesh, options: NativeCpuBackend(options=options),
    "gpu": lambda mesh, options: NativeGpuBackend.of(mesh, options),
}
"""Platform of a mesh, as JAX names it → the target that generates code for it."""

AUTOMATIC = ("cpu",)
"""The platforms whose target the backend `auto` uses; the one for GPUs has not been seen to run."""

STAMPS: Mapping[str, Callable[[], HostStamps | GpuStamps]] = {"cpu": HostStamps, "gpu": GpuStamps}
"""The platforms on whose devices times are written where work runs → what writes them."""

EVERYWHERE: Mapping[str, MakeBackend] = {"reference": lambda mesh, options: ReferenceBackend(options)}
"""The name of a backend in the options → the target, for meshes of every platform."""

DESCRIBED: Mapping[str, Callable[[], Target]] = {
    "cpu": NativeCpu,
    **{name: functools.partial(GpuTarget, gpu) for name, gpu in GPUS.items()},
    **{f"sm_{gpu.capability}": functools.partial(GpuTarget, gpu) for gpu in GPUS.values()},
}
"""The name of a kind of device → its target; the device need not be here."""

TUNERS: Mapping[str, Callable[[TuningTask, Callable[[str], None]], Path]] = {"gpu": tune}
"""Platform → what measures the kernels of its target on this machine."""
