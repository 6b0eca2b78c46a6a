"""Causal attention as steps of a handler: which kernels, which blocks, which launches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from benchmarks.gpu import attention_kernels as kernels
from benchmarks.gpu.attention_kernels import LOG2_E
from benchmarks.gpu.handler import GpuBuffer, Launch, Scalar
from benchmarks.gpu.triton_kernels import TritonKernel, compile_triton

_TYPES = (
    dict.fromkeys(("Q", "K", "V", "O", "DO", "DQ", "DK", "DV"), "*bf16")
    | dict.fromkeys(("L", "Delta"), "*fp32")
    | {"factor": "fp32", "scale": "fp32", "positions": "i32", "heads": "i32", "row": "i32", "image": "i32"}
)
DELTA_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel tiles the scores.

    Attributes:
        rows: queries of a block.
        keys: keys of a block.
        warps: of a thread block.
        stages: of software pipelining.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.keys}w{self.warps}s{self.stages}"


# Tried in this order; the first of each is the default without measurements.
FORWARD = {
    64: (Blocks(128, 64, 4, 3), Blocks(128, 128, 8, 3), Blocks(128, 128, 4, 2)),
    128: (Blocks(128, 64, 8, 3), Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 2)),
}
DK_DV = {
    64: (Blocks(64, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 128, 8, 3)),
    128: (Blocks(64, 128, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 4, 2)),
}
DQ = {
    64: (Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3)),
    128: (Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(128, 128, 8, 2)),
}


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """q, k, v: bf16[batch, positions, heads, dim]."""

    batch: int
    positions: int
    heads: int
    dim: int

    @property
    def array(self) -> tuple[int, int, int, int]:
        """The shape of q."""
        return self.batch, self.positions, self.heads, self.dim

    @property
    def sums(self) -> tuple[int, int, int]:
        """The shape of the logarithms of the rows' sums."""
        return self.batch, self.heads, self.positions

    @property
    def forward_flops(self) -> float:
        """Of the two products over the scores that are not masked."""
        return 2.0 * self.batch * self.heads * self.positions**2 * self.dim

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """Positions, heads, and the strides of position and batch."""
        row = self.heads * self.dim
        return tuple(Scalar("i32", n) for n in (self.positions, self.heads, row, row * self.positions))

    @property
    def scale(self) -> float:
        """The scale of the scores."""
        return 1.0 / math.sqrt(self.dim)


def compile_kernel(which: str, dim: int, blocks: Blocks, arch: str) -> TritonKernel:
    """One of `forward`, `delta`, `dk_dv`, `dq`."""
    constants = {"BM": blocks.rows, "HD": dim} | ({} if which == "delta" else {"BN": blocks.keys})
    function: Any = getattr(kernels, f"attention_{which}")
    return compile_triton(function, _TYPES, constants, arch=arch, warps=blocks.warps, stages=blocks.stages)


def forward_step(number: int, kernel: TritonKernel, blocks: Blocks, shape: AttentionShape) -> Launch:
    """Buffers: q, k, v; o, sums."""
    grid = (shape.positions // blocks.rows, shape.batch * shape.heads, 1)
    factor = Scalar("float", shape.scale * LOG2_E)
    return kernel.launch(number, grid, (*map(GpuBuffer, range(5)), factor, *shape.scalars))


def delta_step(number: int, kernel: TritonKernel, shape: AttentionShape) -> Launch:
    """Buffers: q, k, v, o, sums, do; dq, dk, dv, delta."""
    grid = (shape.positions // DELTA_ROWS, shape.batch * shape.heads, 1)
    return kernel.launch(number, grid, (GpuBuffer(3), GpuBuffer(5), GpuBuffer(9), *shape.scalars))


def dk_dv_step(number: int, kernel: TritonKernel, blocks: Blocks, shape: AttentionShape) -> Launch:
    """Buffers as in `delta_step`."""
    grid = (shape.positions // blocks.keys, shape.batch * shape.heads, 1)
    buffers = tuple(map(GpuBuffer, (0, 1, 2, 5, 4, 9, 7, 8)))
    return kernel.launch(number, grid, (*buffers, *_factors(shape), *shape.scalars))


def dq_step(number: int, kernel: TritonKernel, blocks: Blocks, shape: AttentionShape) -> Launch:
    """Buffers as in `delta_step`."""
    grid = (shape.positions // blocks.rows, shape.batch * shape.heads, 1)
    buffers = tuple(map(GpuBuffer, (0, 1, 2, 5, 4, 9, 6)))
    return kernel.launch(number, grid, (*buffers, *_factors(shape), *shape.scalars))


def _factors(shape: AttentionShape) -> tuple[Scalar, Scalar]:
    return Scalar("float", shape.scale * LOG2_E), Scalar("float", shape.scale)
