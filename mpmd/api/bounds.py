"""Roofline of a step: compute-bound and memory-bound seconds of its fragments and transfers."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass

from mpmd.api.estimate import DeviceSpeed
from mpmd.compile.executable import Executable
from mpmd.compile.kernels.cost.device import HOST, OF_PLATFORM, Device
from mpmd.runtime.instructions import Run, Send
from mpmd.runtime.program import Program

COMPUTE, MEMORY = "compute-bound seconds", "memory-bound seconds"
_BAR = 24


@dataclass(frozen=True)
class BoundTerm:
    """Fragments or transfers of one kind.

    Attributes:
        label: which.
        times: how often a step executes it.
        compute: projected compute-bound seconds, over all executions.
        memory: projected memory-bound seconds, likewise, with the overhead of starting and calling.
    """

    label: str
    times: int
    compute: float
    memory: float

    @property
    def seconds(self) -> float:
        """Seconds over all executions."""
        return self.compute + self.memory


@dataclass(frozen=True)
class StepBounds:
    """The roofline of one step, summed over all meshes, although meshes work at the same time.

    Attributes:
        parts: fragments in the order of the executables, then transfers by their meshes.
    """

    parts: tuple[BoundTerm, ...]

    def totals(self) -> dict[str, float]:
        """Compute-bound and memory-bound seconds of the step, and of the latter those of transfers."""
        transfers = sum(p.seconds for p in self.parts if p.label.startswith("transfer "))
        return {
            COMPUTE: sum(p.compute for p in self.parts),
            MEMORY: sum(p.memory for p in self.parts),
            "transfer seconds": float(transfers),
        }

    def text(self) -> str:
        """A table: a bar for each entry, `█` for the compute-bound and `░` for the memory-bound share."""
        whole = sum(p.seconds for p in self.parts) or 1.0
        lines = [" share  projected us  runs  compute █, memory ░"]
        for p in sorted(self.parts, key=lambda p: -p.seconds):
            bar = "█" * round(p.compute / whole * _BAR) + "░" * round(p.memory / whole * _BAR)
            figures = f"{p.seconds / whole:6.1%} {p.seconds * 1e6:13.2f} {p.times:5}"
            lines.append(f"{figures}  {bar.ljust(_BAR, '·')} {p.label}")
        totals = self.totals()
        for key, name in ((COMPUTE, "compute-bound"), (MEMORY, "memory-bound, calls and transfers included")):
            lines.append(f"{totals[key] / whole:6.1%} {totals[key] * 1e6:13.2f}  {name}")
        return "\n".join(lines) + "\n"


def step_bounds(
    program: Program, executables: Mapping[str, Executable], platforms: Mapping[str, str]
) -> StepBounds:
    """The roofline of a step by the cost models.

    A fragment that XLA compiles is priced as one kernel, by its operations and bytes; messages as between CPU
    cores.

    Args:
        program: the streams.
        executables: by name.
        platforms: of each mesh, as JAX names it.
    """
    speed = DeviceSpeed()
    runs: collections.Counter[str] = collections.Counter()
    sent: dict[str, list[float]] = {}
    for stream in program.streams:
        for op in stream.instructions:
            if isinstance(op, Run):
                runs[op.executable] += 1
            elif isinstance(op, Send):
                target = program.channels[op.channel].types[op.sequence]
                seconds = speed.link_s + target.bytes / speed.link_bytes_per_s
                sent.setdefault(f"transfer {stream.mesh} to {target.mesh}", []).append(seconds)
    parts = []
    for name, executable in executables.items():
        device = OF_PLATFORM.get(platforms[executable.fragment.mesh], HOST)
        parts.append(_part(name, runs[name], executable.cost_analysis(), device))
    parts += [BoundTerm(label, len(found), 0.0, sum(found)) for label, found in sorted(sent.items())]
    return StepBounds(tuple(parts))


def _part(name: str, times: int, costs: Mapping[str, float], device: Device) -> BoundTerm:
    """The executions of a fragment."""
    if COMPUTE in costs:
        return BoundTerm(name, times, times * costs[COMPUTE], times * costs[MEMORY])
    compute = costs.get("flops", 0.0) / device.matmul_rate("f32")
    memory = costs.get("bytes accessed", 0.0) / device.bandwidth
    if compute > memory:
        return BoundTerm(name, times, times * compute, times * device.call_seconds)
    return BoundTerm(name, times, 0.0, times * (memory + device.call_seconds))
