"""Typed attributes of instructions: one immutable record per form, each with its HLO text.

Records are values: equal fields, equal record; they hash, and several instructions may share one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

Ints = tuple[int, ...]


def braces(values: Ints) -> str:
    """`{1,2}`."""
    return "{" + ",".join(map(str, values)) + "}"


class Verbatim(str):
    """An attribute kept as its text: it is carried along, never interpreted."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DotDims:
    """Dimension numbers of a matrix product.

    The result's dims are the batch dims, then the free dims of the left side, then those of the right side.
    """

    lhs_contracting: Ints = ()
    rhs_contracting: Ints = ()
    lhs_batch: Ints = ()
    rhs_batch: Ints = ()

    def lhs_free(self, rank: int) -> Ints:
        """Dims of the left side that are neither contracted nor batched."""
        return tuple(d for d in range(rank) if d not in self.lhs_contracting and d not in self.lhs_batch)

    def rhs_free(self, rank: int) -> Ints:
        """Dims of the right side that are neither contracted nor batched."""
        return tuple(d for d in range(rank) if d not in self.rhs_contracting and d not in self.rhs_batch)


@dataclass(frozen=True, slots=True)
class GatherDims:
    """Dimension numbers of a gather (as in StableHLO's specification, section `gather`)."""

    offset_dims: Ints
    collapsed_slice_dims: Ints
    start_index_map: Ints
    index_vector_dim: int
    operand_batching_dims: Ints = ()
    start_indices_batching_dims: Ints = ()


@dataclass(frozen=True, slots=True)
class ScatterDims:
    """Dimension numbers of a scatter (as in StableHLO's specification, section `scatter`)."""

    update_window_dims: Ints
    inserted_window_dims: Ints
    scatter_dims_to_operand_dims: Ints
    index_vector_dim: int
    input_batching_dims: Ints = ()
    scatter_indices_batching_dims: Ints = ()


@dataclass(frozen=True, slots=True)
class PadDim:
    """Padding of one dim: elements before, after (both may be negative) and between neighbours."""

    low: int
    high: int
    interior: int = 0

    def padded(self, size: int) -> int:
        """Size of the dim after padding."""
        return size + self.low + self.high + max(size - 1, 0) * self.interior


Padding = tuple[PadDim, ...]


@dataclass(frozen=True, slots=True)
class SliceDims:
    """Start (inclusive), limit (exclusive) and stride per dim."""

    starts: Ints
    limits: Ints
    strides: Ints

    @property
    def sizes(self) -> Ints:
        return tuple(max(0, -(-(b - a) // s)) for a, b, s in zip(self.starts, self.limits, self.strides))

    def numpy(self) -> tuple[slice, ...]:
        return tuple(slice(a, b, s) for a, b, s in zip(self.starts, self.limits, self.strides))


@dataclass(frozen=True, slots=True)
class WindowDim:
    """The positions of a window along one dim."""

    size: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1
    reversed: bool = False

    def positions(self, size: int) -> int:
        """The number of window positions along a dim of `size` elements."""
        base = (size - 1) * self.lhs_dilation + 1 if size else 0
        window = (self.size - 1) * self.rhs_dilation + 1 if self.size else 0
        room = base + self.pad_low + self.pad_high - window
        return room // self.stride + 1 if room >= 0 and self.size else 0


@dataclass(frozen=True, slots=True)
class Window:
    """One `WindowDim` per dim."""

    dims: tuple[WindowDim, ...] = ()

    @property
    def sizes(self) -> Ints:
        """The window's size per dim."""
        return tuple(d.size for d in self.dims)

    def __str__(self) -> str:
        if not self.dims:
            return "{}"

        def joined(parts: list[str]) -> str:
            return "x".join(parts)

        out = ["size=" + joined([str(d.size) for d in self.dims])]
        if any(d.stride != 1 for d in self.dims):
            out.append("stride=" + joined([str(d.stride) for d in self.dims]))
        if any(d.pad_low or d.pad_high for d in self.dims):
            out.append("pad=" + joined([f"{d.pad_low}_{d.pad_high}" for d in self.dims]))
        if any(d.lhs_dilation != 1 for d in self.dims):
            out.append("lhs_dilate=" + joined([str(d.lhs_dilation) for d in self.dims]))
        if any(d.rhs_dilation != 1 for d in self.dims):
            out.append("rhs_dilate=" + joined([str(d.rhs_dilation) for d in self.dims]))
        if any(d.reversed for d in self.dims):
            out.append("rhs_reversal=" + joined([str(int(d.reversed)) for d in self.dims]))
        return "{" + " ".join(out) + "}"


@dataclass(frozen=True, slots=True)
class ConvDims:
    """Roles of the dims of a convolution's image, kernel and result; `?` in the text is a dim without one."""

    lhs_batch: int
    lhs_feature: int
    lhs_spatial: Ints
    rhs_input_feature: int
    rhs_output_feature: int
    rhs_spatial: Ints
    out_batch: int
    out_feature: int
    out_spatial: Ints

    def __str__(self) -> str:
        def side(letters: dict[int, str], spatial: Ints) -> str:
            letters = letters | {d: str(i) for i, d in enumerate(spatial)}
            return "".join(letters.get(d, "?") for d in range(max(letters) + 1))

        lhs = side({self.lhs_batch: "b", self.lhs_feature: "f"}, self.lhs_spatial)
        rhs = side({self.rhs_input_feature: "i", self.rhs_output_feature: "o"}, self.rhs_spatial)
        return f"{lhs}_{rhs}->{side({self.out_batch: 'b', self.out_feature: 'f'}, self.out_spatial)}"


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """Groups of devices in a collective.

    One of three written forms; `groups()` gives the same answer for each.

    Attributes:
        explicit: the groups, written out; () means one group of all.
        iota: (groups, size, reshape dims, transpose) of the compact form `[2,4]<=[4,2]T(1,0)`, else None.
        mesh: the text of the form `mesh['a'=2,'b'=4]{'a'}`, else "".
        mesh_groups: the groups in this text.
    """

    explicit: tuple[Ints, ...] = ()
    iota: tuple[int, int, Ints, Ints] | None = None
    mesh: str = ""
    mesh_groups: tuple[Ints, ...] = ()

    def groups(self, devices: int) -> tuple[Ints, ...]:
        """The groups as lists of device numbers; all devices together when none are named."""
        if self.iota is not None:
            count, size, dims, transpose = self.iota
            order = np.arange(math.prod(dims)).reshape(dims).transpose(transpose).reshape(count, size)
            return tuple(tuple(int(i) for i in row) for row in order)
        groups = self.explicit or self.mesh_groups
        return groups if groups else (tuple(range(devices)),)

    def __str__(self) -> str:
        if self.mesh:
            return self.mesh
        if self.iota is not None:
            count, size, dims, transpose = self.iota
            text = f"[{count},{size}]<=[{','.join(map(str, dims))}]"
            if transpose != tuple(range(len(dims))):
                text += f"T({','.join(map(str, transpose))})"
            return text
        return "{" + ",".join(braces(g) for g in self.explicit) + "}"


@dataclass(frozen=True, slots=True)
class OutputAlias:
    """A result position that shares memory with an operand position (custom calls, fusions)."""

    output_index: Ints
    operand: int
    operand_index: Ints

    def __str__(self) -> str:
        return f"{_spaced(self.output_index)}: ({self.operand}, {_spaced(self.operand_index)})"


def _spaced(values: Ints) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


@dataclass(frozen=True, slots=True)
class InputOutputAlias:
    """A result of the entry computation that may, or must, reuse a parameter's memory."""

    output_index: Ints
    parameter: int
    parameter_index: Ints = ()
    kind: str = "may-alias"

    def __str__(self) -> str:
        return (
            f"{_spaced(self.output_index)}: ({self.parameter}, {_spaced(self.parameter_index)}, {self.kind})"
        )


@dataclass(frozen=True, slots=True)
class BufferDonor:
    """A parameter whose memory the program may reuse for anything."""

    parameter: int
    parameter_index: Ints = ()

    def __str__(self) -> str:
        return f"({self.parameter}, {_spaced(self.parameter_index)})"


Attribute = (
    bool
    | int
    | float
    | str
    | Ints
    | tuple[Ints, ...]
    | tuple[str, ...]
    | Padding
    | DotDims
    | GatherDims
    | ScatterDims
    | SliceDims
    | Window
    | ConvDims
    | ReplicaGroups
    | tuple[OutputAlias, ...]
    | None
)
"""Types of an instruction's attributes."""

__all__ = [
    "Attribute",
    "BufferDonor",
    "ConvDims",
    "DotDims",
    "GatherDims",
    "InputOutputAlias",
    "Ints",
    "OutputAlias",
    "PadDim",
    "Padding",
    "ReplicaGroups",
    "ScatterDims",
    "SliceDims",
    "Verbatim",
    "Window",
    "WindowDim",
    "braces",
    "replace",
]
