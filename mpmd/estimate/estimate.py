"""Seconds of fragments and transfers by the work that they do, and the limits that bound them."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpmd import ir
from mpmd.brief import brief
from mpmd.compile.cost.hlo_cost import Cost, CostModel
from mpmd.compile.driver import lowered
from mpmd.compile.executable import Executable
from mpmd.compile.fragment import FragmentModule, fragment_modules
from mpmd.compile.passes import make_pass
from mpmd.config.described import device_of_meshes
from mpmd.cost.device import HOST, Device, device_of
from mpmd.errors import CompileError
from mpmd.estimate.program_timeline import predicted_timeline
from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.streams import Copy, Program, Run, Send, between_memories


def predicted_seconds(program: Program, module: ir.Module, meshes: Mapping[str, Any]) -> float:
    """Estimated seconds of a step on the devices of its meshes; infinite where no work can be counted.

    Args:
        program: the streams.
        module: after the export pipeline.
        meshes: the JAX mesh behind each name.
    """
    try:
        costs = estimate_costs(program, fragment_modules(module, ()), meshes, device_of_meshes(meshes))
    except CompileError:
        return math.inf
    return predicted_timeline(program, costs, list(meshes)).makespan_s


def estimate_costs(
    program: Program, fragments: Mapping[str, FragmentModule], meshes: Mapping[str, Any], device: Device
) -> ProgramCosts:
    """Seconds by the roofline: the larger of the times to compute and to move arguments and results.

    Operations inside of a fragment are taken to be fused.  Collectives come from the program of one device
    as our compiler partitions it, and wait for each other and for the arithmetic.

    Args:
        program: the streams.
        fragments: by name.
        meshes: the JAX mesh behind each name.
        device: each one of the meshes.

    Raises:
        CompileError: the work of a fragment cannot be counted; names the operation.
    """
    seconds: dict[str, float] = {}
    transfers = host_copy_seconds(program, meshes, device)
    for stream in program.streams:
        size = [buffer.type.bytes for buffer in stream.buffers]
        devices = meshes[stream.mesh].size
        for op in stream.instructions:
            if isinstance(op, Run) and op.executable not in seconds:
                work = _work(fragments[op.executable], dict(meshes[stream.mesh].shape))
                moved = sum(size[b] for b in (*op.inputs, *op.outputs)) / devices  # replicas are counted
                arithmetic = arithmetic_seconds(work, device)
                exchange = device.message_seconds(work.bytes_sent, work.messages)
                seconds[op.executable] = (
                    device.call_seconds + max(arithmetic, moved / device.bandwidth) + exchange
                )
            elif isinstance(op, Send):
                target = program.channels[op.channel].types[op.sequence]
                kinds = stream.buffers[op.buffer].type, target
                transfers[kinds] = device.message_seconds(target.bytes / meshes[target.mesh].size)
    return ProgramCosts(seconds, transfers)


def host_copy_seconds(
    program: Program, meshes: Mapping[str, Any], device: Device
) -> dict[tuple[BufferType, BufferType], float]:
    """Seconds of each kind of copy between the memory of a device and of its host."""
    copies = [(op, s) for s in program.streams for op in s.instructions if isinstance(op, Copy)]
    found = dict.fromkeys(between_memories(op, stream) for op, stream in copies)
    sizes = {kinds: kinds[1].bytes / meshes[kinds[1].mesh].size for kinds in found if kinds is not None}
    return {kinds: device.host_copy_seconds(size) for kinds, size in sizes.items()}


def arithmetic_seconds(work: Cost, device: Device) -> float:
    """Seconds of the arithmetic of some work at the rates of products."""
    wide = work.flops - work.narrow_flops + work.transcendentals
    return device.products_seconds(wide) + device.products_seconds(work.narrow_flops, "bf16")


_COUNTING_TRIPS = ("hlo-call-inliner", "hlo-while-simplifier", "hlo-while-simplifier")
"""The second time limits of loops are constants."""


def _work(fragment: FragmentModule, axes: Mapping[str, int]) -> Cost:
    module = lowered(fragment, axes)
    for name in _COUNTING_TRIPS:
        make_pass(name).run(module)
    return CostModel().module(module)


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

    __repr__ = brief

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
    runs: collections.Counter[str] = collections.Counter()
    sent: dict[str, list[float]] = {}
    for stream in program.streams:
        for op in stream.instructions:
            if isinstance(op, Run):
                runs[op.executable] += 1
            elif isinstance(op, Send):
                target = program.channels[op.channel].types[op.sequence]
                seconds = HOST.message_seconds(target.bytes)
                sent.setdefault(f"transfer {stream.mesh} to {target.mesh}", []).append(seconds)
    parts = []
    for name, executable in executables.items():
        device = device_of(platforms[executable.fragment.mesh])
        parts.append(_part(name, runs[name], executable.cost_analysis(), device))
    parts += [BoundTerm(label, len(times), 0.0, sum(times)) for label, times in sorted(sent.items())]
    return StepBounds(tuple(parts))


def _part(name: str, times: int, costs: Mapping[str, float], device: Device) -> BoundTerm:
    if COMPUTE in costs:
        return BoundTerm(name, times, times * costs[COMPUTE], times * costs[MEMORY])
    compute = costs.get("flops", 0.0) / device.matmul_rate("f32")
    memory = costs.get("bytes accessed", 0.0) / device.bandwidth
    if compute > memory:
        return BoundTerm(name, times, times * compute, times * device.call_seconds)
    return BoundTerm(name, times, 0.0, times * (memory + device.call_seconds))
