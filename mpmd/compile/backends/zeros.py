"""Fragments that only fill zeros, such as the start of accumulators, on CPU: arrays without a program.

Their results are pages that were mapped and never written, which the system backs by one page of zeros: they
take no memory and no time.  XLA never writes to memory that it does not own: where such an array is donated,
it allocates the result and copies the zeros.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mpmd import ir
from mpmd.brief import brief
from mpmd.compile.backends.jax_function import named_sharding, numpy_dtype
from mpmd.compile.executable import MemoryStats, unknown_text
from mpmd.compile.fragment import FragmentModule

_ZEROS = ("0.000000e+00", "0", "false", "(0.000000e+00,0.000000e+00)")


def makes_only_zeros(fragment: FragmentModule, mesh: Mesh) -> bool:
    """Whether the fragment has no arguments, and all its results are zero, in the memory of CPU devices.

    The devices must be of one process.
    """
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        return False
    if fragment.arguments or fragment.token or any(r.memory_kind for r in fragment.results):
        return False
    if mesh.devices.flat[0].platform != "cpu":
        return False
    return all(_keeps_zero(op) for op in ir.parse(fragment.text).body.operations)


def _keeps_zero(op: Any) -> bool:
    """Whether an operation, and those inside it, maps zeros to zeros."""
    match op.operation.name:
        case "stablehlo.constant":
            text = ir.op_text(op)  # the bindings do not support attributes of complex numbers
            return text.partition("dense<")[2].partition(">")[0] in _ZEROS
        case "func.func":
            return all(_keeps_zero(inner) for block in op.regions[0] for inner in block.operations)
        case name:
            return name in ("stablehlo.broadcast_in_dim", "func.return", "sdy.mesh")


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    count = math.prod(shape)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=private, prot=mmap.PROT_READ)
    return np.frombuffer(pages, dtype, count).reshape(shape)


@dataclasses.dataclass
class ZerosExecutable:
    """A fragment that only fills zeros; nothing was compiled."""

    fragment: FragmentModule
    mesh: Mesh
    backend: str = "zeros"
    has_token: bool = False
    immediate: bool = True

    __repr__ = brief

    def __post_init__(self) -> None:
        self._arrays = [_zeros(r.shape, numpy_dtype(r.dtype)) for r in self.fragment.results]
        self._shardings = [named_sharding(self.mesh, r) for r in self.fragment.results]

    @property
    def name(self) -> str:
        return self.fragment.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        return jax.device_put(self._arrays, self._shardings)

    def as_text(self, what: str = "hlo") -> str:
        """The fragment as it was given: there is no later form.

        Raises:
            CompileError: no fragment has such a text.
        """
        return self.fragment.text if what in ("stablehlo", "hlo") else unknown_text(what, "zeros")

    def cost_analysis(self) -> dict[str, float]:
        """No work, and nothing read or written."""
        return {"flops": 0.0, "bytes accessed": 0.0}

    def memory_analysis(self) -> MemoryStats:
        """Bytes of the results per device, as their readers count them."""
        shapes = (s.shard_shape(a.shape) for s, a in zip(self._shardings, self._arrays, strict=True))
        sizes = (math.prod(shape) * a.itemsize for shape, a in zip(shapes, self._arrays, strict=True))
        return MemoryStats(results=sum(sizes))
