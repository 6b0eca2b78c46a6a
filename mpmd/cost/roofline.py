"""Seconds of a kernel, from its work and the description of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.cost.device import Device


@dataclass(frozen=True)
class KernelWorkload:
    """The work of one kernel.

    Attributes:
        kind: of the kernel: `loop`, `row`, `column`, `mixed` or `matmul`.
        flops: floating-point operations as commonly counted: one per elementwise operation, two per
            multiply-add.
        vector_bytes: operand bytes that vector instructions work on, each operation weighted by its cost: the
            instructions themselves are this over the device's vector width.
        matmul_dtype: element type of a matrix product; empty for other kernels.
        read_bytes: bytes that are read at least once.
        again_bytes: bytes that are read again, by other points or by later passes.
        written_bytes: bytes that are written.
        scattered_bytes: bytes, of the above, for which neighbours in a vector do not share cache lines.
        scattered_elements: how many separate accesses these are.
        parts: parts that can run at the same time.
        rows: number of reductions along a row.
        live_values: maximum of values of a point that are live together.
    """

    kind: str
    flops: float
    vector_bytes: float
    read_bytes: float
    again_bytes: float
    written_bytes: float
    parts: int
    matmul_dtype: str = ""
    scattered_bytes: float = 0.0
    scattered_elements: float = 0.0
    rows: int = 0
    live_values: int = 0

    @property
    def memory_bytes(self) -> float:
        """Lower bound of the bytes to move."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class Estimate:
    """A price.

    Attributes:
        seconds: time of the kernel.
        limiter: `compute`, `memory` or `start`: the largest part of it.
        compute_seconds: for instructions.
        memory_seconds: for moving data.
        start_seconds: overhead.
    """

    seconds: float
    limiter: str
    compute_seconds: float
    memory_seconds: float
    start_seconds: float


def speed_of_light(work: KernelWorkload, device: Device) -> Estimate:
    """The time no implementation can beat: each byte once at full rate, operations at peak, overlapped."""
    if work.matmul_dtype:
        compute = work.flops / device.matmul_rate(work.matmul_dtype)
    else:
        compute = work.flops / (2 * device.vector_rate * device.vector_bytes / 4)
    memory = work.memory_bytes / device.bandwidth_for(work.memory_bytes)
    seconds = max(compute, memory)
    return Estimate(seconds, "compute" if compute >= memory else "memory", compute, memory, 0.0)


def projected(work: KernelWorkload, device: Device) -> Estimate:
    """The time of a good implementation: vector instructions, caches, parallel parts and start-up priced."""
    busy = min(work.parts, device.units) / device.units
    if work.matmul_dtype:
        compute = work.flops / (device.matmul_rate(work.matmul_dtype) * device.matmul_efficiency * busy)
    else:
        instructions = work.vector_bytes / device.vector_bytes
        instructions += _spills(work, device)
        instructions += work.scattered_elements
        instructions += work.rows * device.row_end_cycles
        compute = instructions / (device.vector_rate * busy)
    memory = _memory_seconds(work, device) / max(busy, 0.25)
    together = compute + memory - device.overlap * min(compute, memory)
    seconds = together + device.start_seconds
    parts = {"compute": compute, "memory": memory, "start": device.start_seconds}
    return Estimate(seconds, max(parts, key=lambda p: parts[p]), compute, memory, device.start_seconds)


def combined(parts: Sequence[Estimate], device: Device) -> Estimate:
    """One kernel of several parts, such as a product and its epilogue, started once.

    Args:
        parts: estimates by `speed_of_light`, or by `projected`, of each.
        device: which they are for.
    """
    computing = [p.compute_seconds for p in parts]
    compute = max(computing) if device.product_units else sum(computing)
    memory = sum(p.memory_seconds for p in parts)
    start = max(p.start_seconds for p in parts)
    hidden = device.overlap if start else 1.0  # at the speed of light all of it hides
    seconds = compute + memory - hidden * min(compute, memory) + start
    limits = {"compute": compute, "memory": memory, "start": start}
    return Estimate(seconds, max(limits, key=lambda p: limits[p]), compute, memory, start)


def _memory_seconds(work: KernelWorkload, device: Device) -> float:
    """First touches from the level that holds the working set, repeated ones from one level further in."""
    size = work.memory_bytes
    rate = device.bandwidth_for(size)
    inner = max((r for _, r in device.levels), default=rate)
    near = device.bandwidth_for(size / max(1, work.parts))
    lines = work.scattered_elements * device.line_bytes - work.scattered_bytes
    wasted = max(0.0, lines) / max(rate, 1.0) if work.scattered_elements else 0.0
    return size / rate + work.again_bytes / min(inner, max(near, rate)) + wasted / 8


def _spills(work: KernelWorkload, device: Device) -> float:
    """Instructions for values that do not fit into the registers."""
    too_many = max(0, work.live_values - (device.registers - 4))
    each = work.vector_bytes / device.vector_bytes / max(1, work.live_values)
    return too_many * each * device.spill_cycles
