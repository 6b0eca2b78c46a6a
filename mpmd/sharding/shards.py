"""Shards: the axes that split a value, and the bytes of one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from mpmd import ir

Split = tuple[tuple[str, ...], ...]
"""For each dim the axes that split it, the outermost first."""


def split_of(sharding: ir.Attribute | None, rank: int) -> Split:
    """A sharding as the names of axes; a part of an axis has a name that no axis has."""
    if sharding is None:
        return ((),) * rank
    return tuple(tuple(_axis_name(axis) for axis in dim) for dim in axes_by_dim(sharding))


def split_axes(split: Split) -> frozenset[str]:
    return frozenset(axis for dim in split for axis in dim)


def _axis_name(axis: Any) -> str:
    return str(axis.name) if axis.sub_axis_info is None else str(axis)


def without(split: Split, axes: Sequence[str]) -> Split:
    """The same split, along none of the axes."""
    return tuple(tuple(axis for axis in dim if axis not in axes) for dim in split)


def without_axes(axes: Sequence[str], others: frozenset[str]) -> tuple[str, ...]:
    """Those of some axes that are not among others."""
    return tuple(axis for axis in axes if axis not in others)


def innermost(split: Split, axes: Sequence[str]) -> dict[str, int]:
    """The axes, among some, that split a dim within all others that do, the outermost first; and the dims.

    Along these the parts of a value lie within what a device holds of a value that is whole along them.
    """
    sizes_inside: dict[str, int] = {}
    for dim, of_dim in enumerate(split):
        inner = list(itertools.takewhile(lambda axis: axis in axes, reversed(of_dim)))
        if set(of_dim) & set(axes) <= set(inner):
            sizes_inside.update(dict.fromkeys(reversed(inner), dim))
    return sizes_inside


def text_of(split: Split, mesh: str) -> str:
    dims = ("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in split)
    return f"<{mesh}, [{', '.join(dims)}]>"


def sharding_of(split: Split, mesh: str) -> ir.Attribute:
    return ir.Attribute.parse("#sdy.sharding" + text_of(split, mesh), ir.context())


def sdy_meshes(module: Any) -> dict[str, ir.sdy.MeshAttr]:
    """Name -> mesh, of the `sdy.mesh` ops of a module."""
    meshes = [op for op in module.regions[0].blocks[0].operations if isinstance(op, ir.sdy.MeshOp)]
    return {str(op.sym_name.value): ir.sdy.MeshAttr(op.mesh) for op in meshes}


def axes_of(mesh: ir.sdy.MeshAttr) -> dict[str, int]:
    """Axis name -> size."""
    return {axis.name: axis.size for axis in (ir.sdy.MeshAxisAttr(a) for a in mesh.axes)}


def on_sdy_mesh(shardings: ir.Attribute, name: str) -> ir.Attribute:
    """The same sharding, or shardings of several values, with the axes of the sdy mesh called `name`."""
    if ir.sdy.TensorShardingAttr.isinstance(shardings):
        s = ir.sdy.TensorShardingAttr(shardings)
        return ir.sdy.TensorShardingAttr.get(name, s.dimension_shardings, s.replicated_axes, s.unreduced_axes)
    of_values = ir.sdy.TensorShardingPerValueAttr(shardings).shardings
    return ir.sdy.TensorShardingPerValueAttr.get([on_sdy_mesh(s, name) for s in of_values], ir.context())


def axes_by_dim(sharding: ir.Attribute) -> list[list[ir.sdy.AxisRefAttr]]:
    """The axes, or parts of axes, that shard each dim."""
    dims = ir.sdy.TensorShardingAttr(sharding).dimension_shardings
    return [[ir.sdy.AxisRefAttr(axis) for axis in ir.sdy.DimensionShardingAttr(dim).axes] for dim in dims]


def axis_size(axis: ir.sdy.AxisRefAttr, sizes: dict[str, int]) -> int:
    """The number of parts into which an axis, or a sub-axis, splits a dim."""
    part = axis.sub_axis_info
    return sizes[axis.name] if part is None else int(ir.sdy.SubAxisInfoAttr(part).size)


def local_shape(kind: ir.MeshTensor, mesh: ir.sdy.MeshAttr) -> list[int]:
    """The shape of one device's shard: each dim divided by the sizes of the axes that shard it."""
    shape = list(kind.shape)
    if kind.sharding is None:
        return shape
    sizes = axes_of(mesh)
    parts = [math.prod(axis_size(axis, sizes) for axis in axes) for axes in axes_by_dim(kind.sharding)]
    return [-(-size // count) for size, count in zip(shape, parts)]


def local_bytes(kind: ir.MeshTensor, mesh: ir.sdy.MeshAttr) -> int:
    """Bytes of one device's shard."""
    return -(-math.prod(local_shape(kind, mesh)) * _bit_width(kind.element_type) // 8)


def global_bytes(kind: ir.RankedTensorType | ir.MeshTensor) -> int:
    """Bytes of a whole tensor."""
    return -(-math.prod(kind.shape) * _bit_width(kind.element_type) // 8)


def _bit_width(element: ir.Type) -> int:
    """Bits of one element in memory; a boolean takes a byte, a complex number two floats."""
    if isinstance(element, ir.ComplexType):
        return 2 * _bit_width(element.element_type)
    return 8 if element.width == 1 else int(element.width)
