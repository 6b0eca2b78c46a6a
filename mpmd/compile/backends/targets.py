"""The table of targets: the only module outside of a target that imports it.

A new target is a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_gpu.backend import NativeGpuBackend
from mpmd.compile.backends.reference.backend import ReferenceBackend
from mpmd.compile.backends.target_backend import TargetBackend
from mpmd.compile.options import CompileOptions

MakeBackend = Callable[[Mesh, CompileOptions], TargetBackend]

NATIVE: Mapping[str, MakeBackend] = {
    "cpu": lambda mesh, options: NativeCpuBackend(options=options),
    "gpu": lambda mesh, options: NativeGpuBackend.of(mesh, options),
}
"""Platform of a mesh, as JAX names it → the target that generates code for it."""

AUTOMATIC = ("cpu",)
"""The platforms of which the backend `auto` uses the target; that of GPUs has not been seen to run on one."""

EVERYWHERE: Mapping[str, MakeBackend] = {"reference": lambda mesh, options: ReferenceBackend(options)}
"""The name of a backend in the options → the target, for meshes of every platform."""
