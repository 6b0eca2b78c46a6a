"""The backend of XLA, for any platform: fragments through `jax.jit`, the baseline of all measurements."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
from jax.sharding import Mesh

from mpmd import jax_calls
from mpmd.compile.backends.jax_function import (
    INLINE_BELOW_FLOPS,
    CompiledFragment,
    compiled_function,
    module_p,
)
from mpmd.compile.executable import unknown_text
from mpmd.compile.fragment import FragmentModule

_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$-]+)")
_COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast|ragged-all-to-all)"
    r"(-start)?\("
)
_NO_WORK = frozenset(
    {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"}
)


@dataclasses.dataclass
class XlaExecutable(CompiledFragment):
    """A fragment compiled by XLA.

    Attributes:
        devices: its devices.
        reasons: why native code, if that was requested, does not support it.
    """

    devices: tuple[Any, ...]
    reasons: tuple[str, ...] = ()
    backend: str = "xla"

    @functools.cached_property
    def asynchronous(self) -> bool:
        """Whether a call returns before the work is done.

        XLA on CPU runs a fragment with a callback in the thread that calls it, and so one on a single device
        with little counted work; the work of custom calls is not counted.
        """
        targets = set(_CUSTOM_CALL.findall(self.fragment.text)) - _NO_WORK
        devices = {d for s in jax.tree.leaves(self.compiled.output_shardings) for d in s.device_set}
        if not targets or any(device.platform != "cpu" for device in devices):
            return True
        if any("callback" in target for target in targets):
            return False
        return len(devices) > 1 or self.cost_analysis().get("flops", 0.0) >= INLINE_BELOW_FLOPS

    @functools.cached_property
    def waits_for_arguments(self) -> bool:
        """Whether it must not be called before its arguments are ready.

        XLA on CPU would run it on a thread of the client, and so what it calls back.  What the callback
        computes with JAX may need the same threads: if there is one, it would wait for itself.
        """
        on_one_cpu = len(self.devices) == 1 and self.devices[0].platform == "cpu"
        return on_one_cpu and any("callback" in name for name in _CUSTOM_CALL.findall(self.fragment.text))

    @functools.cached_property
    def waits_for_processes(self) -> bool:
        """Whether its devices are of several processes, and exchange values while it runs."""
        several = len({device.process_index for device in self.devices}) > 1
        return several and _COLLECTIVE.search(self.compiled.as_text() or "") is not None

    def as_text(self, what: str = "hlo") -> str:
        """`"stablehlo"` as given, `"hlo"` as XLA optimised it, or `"clusters"`: why it is XLA's.

        Raises:
            CompileError: another word.
        """
        match what:
            case "stablehlo":
                return self.fragment.text
            case "hlo":
                return self.compiled.as_text() or ""
            case "clusters":
                return "cluster 0: XLA, the whole fragment\n" + "".join(f"  {r}\n" for r in self.reasons)
        return unknown_text(what, "XLA's fragments")

    def cost_analysis(self) -> dict[str, float]:
        """XLA's own count, and one fallback if native code was requested."""
        costs = {str(k): float(v) for k, v in dict(self.compiled.cost_analysis() or {}).items()}
        return {**costs, "fallbacks": 1.0} if self.reasons else costs


@dataclasses.dataclass(frozen=True)
class XlaBackend:
    """Passes fragments to the PJRT client of a mesh."""

    name: str = "xla"

    def compile(self, fragment: FragmentModule, mesh: Mesh) -> XlaExecutable:
        """Compiles for the devices of `mesh`; see `Backend`."""

        def run(*arrays: Any) -> list[Any]:
            return module_p.bind(
                *arrays, text=fragment.text, results=fragment.results, callbacks=fragment.callbacks
            )

        compiled = compiled_function(run, fragment, mesh)
        return XlaExecutable(fragment, compiled, tuple(mesh.devices.flat))

    def relocate(
        self, executable: XlaExecutable, fragment: FragmentModule, mesh: Mesh
    ) -> XlaExecutable | None:
        """Loads it onto the devices of `mesh`, if they are the same ones, or on CPU, where all are alike."""
        devices = tuple(mesh.devices.flat)
        loaded: jax.stages.Compiled | None = executable.compiled
        if devices != executable.devices:
            if devices[0].platform != "cpu":
                return None
            loaded = jax_calls.compiled_for(executable.compiled, executable.devices, devices)
        if loaded is None:
            return None
        return dataclasses.replace(executable, fragment=fragment, compiled=loaded, devices=devices)
