"""Fragments through `jax.jit`: a primitive whose lowering is the fragment's own module."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import jax_compat
from mpmd.compile.backends.arrays import array_types, named_sharding
from mpmd.compile.backends.inlined import INLINE_BELOW_FLOPS, module_p
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.errors import CompileError

_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$-]+)")
_NO_WORK = frozenset(
    {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"}
)


@dataclasses.dataclass
class XlaExecutable:
    """A fragment compiled by XLA."""

    fragment: FragmentModule
    compiled: jax.stages.Compiled
    devices: tuple[Any, ...]
    backend: str = "xla"

    def __post_init__(self) -> None:
        self._call = self.compiled

    @functools.cached_property
    def asynchronous(self) -> bool:
        """Whether a call returns before the work is done.

        XLA on CPU runs a fragment with a callback in the thread that calls it, and so one on a single device
        in which it counts little work; what a custom call does it does not count.
        """
        targets = set(_CUSTOM_CALL.findall(self.fragment.text)) - _NO_WORK
        devices = {d for s in jax.tree.leaves(self.compiled.output_shardings) for d in s.device_set}
        if not targets or any(device.platform != "cpu" for device in devices):
            return True
        if any("callback" in target for target in targets):
            return False
        return len(devices) > 1 or self.cost_analysis().get("flops", 0.0) >= INLINE_BELOW_FLOPS

    @property
    def has_token(self) -> bool:
        """Whether a token stands behind the results."""
        return self.fragment.token

    @property
    def name(self) -> str:
        """The fragment's name."""
        return self.fragment.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        """Starts it; see `Executable`."""
        return self._call(*arrays)

    def as_text(self, what: str = "hlo") -> str:
        """`"stablehlo"` as given, `"hlo"` as XLA optimised it."""
        if what == "stablehlo":
            return self.fragment.text
        return self.compiled.as_text() or ""

    def cost_analysis(self) -> dict[str, float]:
        """XLA's own count."""
        costs = self.compiled.cost_analysis() or {}
        return {str(k): float(v) for k, v in dict(costs).items()}

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


@dataclasses.dataclass(frozen=True)
class XlaBackend:
    """Hands fragments to the PJRT client of a mesh.

    Attributes:
        compiler_options: XLA options, such as `{"xla_cpu_enable_fast_math": True}`.
    """

    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = "xla"

    def compile(self, fragment: FragmentModule, mesh: Mesh) -> XlaExecutable:
        """Compiles for the devices of `mesh`; see `Backend`."""
        arguments = array_types(mesh, fragment.arguments)
        results = fragment.results

        def run(*arrays: Any) -> Any:
            made = module_p.bind(*arrays, text=fragment.text, results=results, callbacks=fragment.callbacks)
            return [*made, jax.numpy.int8(0)] if fragment.token else made

        run.__name__ = run.__qualname__ = fragment.name
        jitted = jax.jit(
            run,
            donate_argnums=fragment.donated,
            keep_unused=True,
            out_shardings=[
                *(named_sharding(mesh, r) for r in results),
                *[NamedSharding(mesh, PartitionSpec())] * fragment.token,
            ],
        )
        try:
            with warnings.catch_warnings():
                # What cannot be donated is freed by the runtime; nothing is lost.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                compiled = jitted.lower(*arguments).compile(self.compiler_options or None)
        except (jax.errors.JaxRuntimeError, ValueError) as e:
            raise CompileError(
                f"XLA cannot compile fragment {fragment.name!r} on {fragment.mesh}: {e}"
            ) from e
        return XlaExecutable(fragment, compiled, tuple(mesh.devices.flat))

    def relocate(
        self, executable: XlaExecutable, fragment: FragmentModule, mesh: Mesh
    ) -> XlaExecutable | None:
        """Loads it onto the devices of `mesh`, if they are the same ones, or on CPU, where all are alike."""
        devices = tuple(mesh.devices.flat)
        if devices == executable.devices:
            return XlaExecutable(fragment, executable.compiled, devices)
        if devices[0].platform != "cpu":
            return None
        loaded = jax_compat.compiled_for(executable.compiled, executable.devices, devices)
        return None if loaded is None else XlaExecutable(fragment, loaded, devices)
