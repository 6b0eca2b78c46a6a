"""The table of targets: the only module outside of a target that imports it.

A new target is a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.reference.backend import ReferenceBackend
from mpmd.compile.backends.target_backend import TargetBackend
from mpmd.compile.options import CompileOptions

NATIVE: Mapping[str, Callable[[CompileOptions], TargetBackend]] = {
    "cpu": lambda options: NativeCpuBackend(options=options),
}
"""Platform of a mesh, as JAX names it → the target that generates code for it."""

NAMED: Mapping[str, Callable[[CompileOptions], TargetBackend]] = {
    "native": NATIVE["cpu"],
    "reference": lambda options: ReferenceBackend(options),
}
"""The name of a backend in the options → the target."""
