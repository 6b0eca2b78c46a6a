"""XLA's programs for a GPU, compiled on a machine without one.

JAX's CUDA plugin compiles for a GPU that is only described.  So without a GPU every program of these
experiments, custom calls included, can be compiled to the end: options are checked, handlers are registered
with XLA's CUDA platform, and the memory that a program takes is known.  What autotuning would choose is not.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

from mpmd.errors import CompileError

_FACTS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_core": 228 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "l2_cache_size": 60 << 20,
    "device_memory_size": 141 * 10**9,
    "memory_bandwidth": 48 * 10**11,
    "clock_rate_ghz": 1.98,
}
# A GpuTargetConfigProto of an H200; the figures are the vendor's.
H200 = (
    f"gpu_device_info {{ {' '.join(f'{k}: {v}' for k, v in _FACTS.items())}"
    " cuda_compute_capability { major: 9 } }"
    ' platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"'
)


def why_not() -> str:
    """Why nothing can be compiled ahead here; empty if it can."""
    plugins = [f"jax_plugins.xla_cuda{version}" for version in (12, 13)]
    if not (importlib.util.find_spec("jax_plugins") and any(map(importlib.util.find_spec, plugins))):
        return "JAX's CUDA plugin is not installed"
    try:
        devices()
    except CompileError as error:
        return str(error)
    return ""


@functools.cache
def devices(count: int = 1) -> tuple[Any, ...]:
    """Described H200s of one process, for shardings of programs that are only compiled.

    Raises:
        CompileError: this JAX cannot compile so.
    """
    import jax
    from jax.experimental import topologies

    jax.devices()  # finds the plugins
    try:
        made = topologies.get_topology_desc(
            platform="cuda", topology_name="described", topology=f"1x1x{count}", target_config=H200
        )
    except (RuntimeError, KeyError) as error:
        raise CompileError(f"this JAX does not compile for a GPU that is not there: {error}") from error
    return tuple(made.devices)


def arguments(*shapes: Any) -> list[Any]:
    """Shapes with dtypes as arguments on the described device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    whole = NamedSharding(Mesh(np.array(devices()[:1]), ("data",)), PartitionSpec())
    return [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole) for shape in shapes]


def compile_program(
    function: Any, *shapes: Any, options: dict[str, Any] | None = None, donated: Sequence[int] = ()
) -> Any:
    """`jax.jit(function)` compiled for the described device."""
    import jax

    lowered = jax.jit(function, donate_argnums=tuple(donated)).lower(*arguments(*shapes))
    return lowered.compile(compiler_options=options or None)


def kernel_count(compiled: Any) -> int:
    """About how many kernels a compiled program launches: fusions, calls and copies in its entry
    computation.
    """
    text = compiled.as_text()
    entry = text[text.rindex("\nENTRY ") :]
    words = (
        " fusion(",
        " custom-call(",
        " copy(",
        " copy-start(",
        " dot(",
        " reduce(",
        " sort(",
        " scatter(",
    )
    return sum(entry.count(word) for word in words)
