"""GPUs as data: what cost models price for, and what kernels and their machine code depend on.

A name means several boards, and slices of them: the driver's facts about one scale the description.

Source: the vendor's data sheets and the CUDA programming guide.
"""

from __future__ import annotations

import dataclasses
import re

from mpmd.cost.device import A100, B200, H100, H200, Device
from mpmd.errors import CompileError


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """A GPU, as its driver describes it.

    Attributes:
        units: multiprocessors.
        clock: their cycles per second.
        l2_bytes: of the second level.
        shared_bytes: of shared memory that one program may have.
        bandwidth: bytes per second that its memory transfers at most.
    """

    units: int
    clock: float
    l2_bytes: int
    shared_bytes: int
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class GpuModel:
    """A kind of GPU.

    Attributes:
        device: its description for the cost models.
        capability: its compute capability, without a dot: 90.
        shared_bytes: of shared memory that one program may have.
        bandwidth: bytes per second of its memory by the data sheet; kernels see less.
    """

    device: Device
    capability: int
    shared_bytes: int
    bandwidth: float

    @property
    def programs(self) -> int:
        """How many programs keep it busy: two for each multiprocessor."""
        return 2 * self.device.units

    def of(self, facts: GpuFacts) -> GpuModel:
        """The model of one board or slice, with the rates of this one in proportion."""
        device = self.device
        faster = facts.units * facts.clock / (device.units * device.cycles_per_second)
        (first, rate), (_, l2_rate), (held, memory_rate) = device.levels
        levels = (
            (first * facts.units / device.units, rate * faster),
            (float(facts.l2_bytes), l2_rate * faster),
            (held, memory_rate * facts.bandwidth / self.bandwidth),
        )
        flops = tuple((dtype, rate * faster) for dtype, rate in device.matmul_flops)
        device = dataclasses.replace(
            device, units=facts.units, cycles_per_second=facts.clock, matmul_flops=flops, levels=levels
        )
        return dataclasses.replace(
            self, device=device, shared_bytes=facts.shared_bytes, bandwidth=facts.bandwidth
        )


GPUS = {
    gpu.device.name: gpu
    for gpu in (
        GpuModel(A100, 80, 163 << 10, 2.04e12),
        GpuModel(H100, 90, 227 << 10, 3.35e12),
        GpuModel(H200, 90, 227 << 10, 4.8e12),
        GpuModel(B200, 100, 227 << 10, 8e12),
    )
}
"""Name → GPU."""


def gpu_model(name: str, capability: int) -> GpuModel:
    """The kind of a GPU.

    Args:
        name: as the driver gives it: "NVIDIA H100 80GB HBM3".
        capability: its compute capability, without a dot.

    Raises:
        CompileError: it is none of `GPUS`.
    """
    words = re.split(r"[ -]", name)
    for model in GPUS.values():
        if model.device.name in words and model.capability == capability:
            return model
    raise CompileError(
        f"there is no description of GPU {name!r} of compute capability {capability / 10}; "
        f"there are {', '.join(GPUS)}"
    )
