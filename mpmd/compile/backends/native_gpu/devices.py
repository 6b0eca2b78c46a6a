"""GPUs as data: what cost models price for, and what kernels and their machine code depend on.

Source: the vendor's data sheets and the CUDA programming guide.
"""

from __future__ import annotations

import dataclasses
import re

from mpmd.compile.kernels.cost.device import A100, B200, H100, H200, Device
from mpmd.errors import CompileError


@dataclasses.dataclass(frozen=True)
class GpuModel:
    """A kind of GPU.

    Attributes:
        device: its description for the cost models.
        capability: its compute capability, without a dot: 90.
        shared_bytes: of shared memory that one program may have.
    """

    device: Device
    capability: int
    shared_bytes: int

    @property
    def programs(self) -> int:
        """How many programs keep it busy: two for each multiprocessor."""
        return 2 * self.device.units


GPUS = {
    gpu.device.name: gpu
    for gpu in (
        GpuModel(A100, 80, 163 << 10),
        GpuModel(H100, 90, 227 << 10),
        GpuModel(H200, 90, 227 << 10),
        GpuModel(B200, 100, 227 << 10),
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
