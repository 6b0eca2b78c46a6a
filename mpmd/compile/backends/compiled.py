"""The compiled JAX function of a fragment; shared by all backends."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.compile.backends.arrays import array_types, named_sharding
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.errors import CompileError
from mpmd.jax_compat import taking_packed

_FILTERS = threading.Lock()


@dataclasses.dataclass
class CompiledFragment:
    """A fragment as a compiled function of JAX.

    Attributes:
        fragment: the fragment.
        compiled: the function.
    """

    fragment: FragmentModule
    compiled: jax.stages.Compiled

    @property
    def has_token(self) -> bool:
        """Whether a token follows the results."""
        return self.fragment.token

    @property
    def name(self) -> str:
        return self.fragment.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        made: Sequence[Any] = self.compiled(*arrays)
        return made

    @property
    def kept_memory(self) -> dict[int, int]:
        """Bytes that it keeps from call to call, by owner: equal keys share them."""
        return {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes per device that it takes while it runs, beside arguments, results and kept memory."""
        return self.memory_analysis().temporaries

    def memory_analysis(self) -> MemoryStats:
        """XLA's own count, per device."""
        stats = self.compiled.memory_analysis()
        return MemoryStats(
            arguments=stats.argument_size_in_bytes,
            results=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
        )


def on_each_device(
    run: Callable[..., Sequence[Any]], fragment: FragmentModule, mesh: Mesh
) -> Callable[..., Sequence[Any]]:
    """A function of each device's parts of a fragment's arguments as one of whole arrays."""
    if mesh.size == 1:
        return run
    given, made = (
        [named_sharding(mesh, v).spec for v in vs] for vs in (fragment.arguments, fragment.results)
    )
    mapped: Callable[..., Sequence[Any]] = jax.shard_map(
        run, mesh=mesh, in_specs=tuple(given), out_specs=made, check_vma=False
    )
    return mapped


def compiled_function(
    run: Callable[..., Sequence[Any]], fragment: FragmentModule, mesh: Mesh
) -> jax.stages.Compiled:
    """Compiles a function of a fragment's arguments for a mesh; adds the token, if there is one.

    Args:
        run: computes the fragment's results, as traced arrays.
        fragment: its name, arguments, results and options of XLA, and which arguments are donated.
        mesh: its mesh.

    Raises:
        CompileError: XLA does not compile it.
    """

    def with_token(*arrays: Any) -> list[Any]:
        return [*run(*arrays), *[jax.numpy.int8(0)] * fragment.token]

    with_token.__name__ = with_token.__qualname__ = fragment.name
    jitted = jax.jit(
        with_token,
        donate_argnums=fragment.donated,
        keep_unused=True,
        out_shardings=[
            *(named_sharding(mesh, result) for result in fragment.results),
            *[NamedSharding(mesh, PartitionSpec())] * fragment.token,
        ],
    )
    try:
        # Steps have values of 64 bits whatever the user's setting, such as the counters of random numbers.
        with jax.enable_x64(True):
            # Filters of warnings belong to the process: one thread at a time may change and restore them.
            with _FILTERS, warnings.catch_warnings():
                # Buffers that cannot be donated are freed by the runtime; nothing is lost.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                lowered = jitted.lower(*array_types(mesh, fragment.arguments))
            return taking_packed(lowered.compile(dict(fragment.compiler_options) or None))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise CompileError(
            f"XLA cannot compile fragment {fragment.name!r} on {fragment.mesh}: {error}"
        ) from error
