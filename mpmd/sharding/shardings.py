"""Shardings while they are attributes: queries, comparison, and updates.

A *split* has the axes of each dim by name; the bytes of one device follow from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def axes_without(axes: Sequence[str], others: frozenset[str]) -> tuple[str, ...]:
    """The axes that are not among others."""
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


ARGUMENT = "sdy.sharding"
Sharding = Any


def of_value(value: ir.Value, f: ir.Func) -> Sharding | None:
    """The sharding of a value between fragments, at its definition; None if there is none."""
    op = ir.producer(value)
    if op is None:
        return f.arg_attribute(ir.arg_index(value), ARGUMENT)
    name = "out_shardings" if isinstance(op, ir.Fragment) else ARGUMENT
    shardings = read(op, name)
    return shardings[ir.result_index(value)] if shardings else None


def read(op: ir.Op, name: str) -> list[Sharding]:
    """The shardings in a per-value attribute; empty if the op does not have it."""
    attribute = op.attributes.get(name)
    return [] if attribute is None else list(ir.sdy.TensorShardingPerValueAttr(attribute).shardings)


def write(op: ir.Op, name: str, shardings: Sequence[Sharding]) -> None:
    """Sets a per-value attribute."""
    ir.put(op, name, ir.sdy.TensorShardingPerValueAttr.get(list(shardings)))


def update(op: ir.Op, name: str, values: Sequence[ir.Value], entries: Mapping[int, Sharding]) -> None:
    """Changes some entries of a per-value attribute of an op.

    If the op does not have it yet, all other entries are open: open dims on the same mesh.  For operands see
    `update_operands`.
    """
    if not entries:
        return
    shardings = read(op, name)
    if not shardings:
        mesh = ir.sdy.TensorShardingAttr(next(iter(entries.values()))).mesh_or_ref
        shardings = [without_axes(mesh, rank(v), is_closed=False) for v in values]
    for i, sharding in entries.items():
        shardings[i] = sharding
    write(op, name, shardings)


def update_operands(fragment: ir.Fragment, f: ir.Func, entries: Mapping[int, Sharding]) -> None:
    """Changes the shardings with which a fragment of `f` reads some operands.

    If it has none yet, it reads all others as they are defined: an open sharding would replace that of the
    definition when shardings become types.
    """
    values = list(fragment.inputs)
    if entries and not read(fragment, "in_shardings"):
        defined = {i: of_value(value, f) for i, value in enumerate(values)}
        entries = {i: sharding for i, sharding in defined.items() if sharding is not None} | dict(entries)
    update(fragment, "in_shardings", values, entries)


# Their sharding is a device's; it does not come from propagation.
_KEEP = ("stablehlo.send", "stablehlo.recv")


def drop_inside(op: ir.Op) -> None:
    """Removes `sdy.sharding` from all ops in an op, itself included, but send and recv."""
    for inner in ir.walk(op):
        if inner.operation.name not in _KEEP:
            ir.put(inner, ARGUMENT, None)


def inside(where: ir.Op) -> Iterator[tuple[ir.Op, str, ir.Attribute]]:
    """The shardings that ops in an op have, of one value or of several: op, name and attribute."""
    return ((op, *entry) for op in ir.walk(where)[1:] for entry in _on_op(op))


def point_to(ops: Iterable[ir.Op], mesh: str) -> None:
    """Lets all shardings of some ops name the sdy mesh `mesh`."""
    for op in ops:
        for name, attribute in list(_on_op(op)):
            ir.put(op, name, on_sdy_mesh(attribute, mesh))


def _on_op(op: ir.Op) -> Iterator[tuple[str, ir.Attribute]]:
    kinds = (ir.sdy.TensorShardingAttr, ir.sdy.TensorShardingPerValueAttr)
    for name in op.attributes.keys():  # noqa: SIM118  (it is not a mapping)
        attribute = None if name == "value" else op.attributes[name]  # complex numbers cannot be read
        if attribute is not None and any(kind.isinstance(attribute) for kind in kinds):
            yield name, attribute


def rank(value: ir.Value) -> int:
    """Number of dims; 0 for a token."""
    return len(value.type.shape) if isinstance(value.type, ir.MeshTensor) else 0


def without_axes(mesh: ir.Attribute, dims: int, is_closed: bool) -> Sharding:
    return ir.sdy.TensorShardingAttr.get(mesh, [ir.sdy.DimensionShardingAttr.get([], is_closed)] * dims)


def is_same(a: Sharding | None, b: Sharding | None) -> bool:
    """Whether two shardings put the same data on every device; none at all is replicated."""
    return _meaning(a) == _meaning(b)


def _meaning(sharding: Sharding | None) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]] | None:
    if sharding is None:
        return None
    axes = tuple(tuple(map(str, dim)) for dim in axes_by_dim(sharding))
    unreduced = tuple(map(str, ir.sdy.TensorShardingAttr(sharding).unreduced_axes))
    return (axes, unreduced) if any(axes) or unreduced else None


def mesh_of(sharding: Sharding) -> str:
    return str(ir.sdy.TensorShardingAttr(sharding).mesh_or_ref)


def drop_sub_axes(sharding: Sharding) -> Sharding:
    """The sharding whose dims end before the first sub-axis; itself if there is none."""
    old = ir.sdy.TensorShardingAttr(sharding)
    dims = []
    for dim in map(ir.sdy.DimensionShardingAttr, old.dimension_shardings):
        axes = list(dim.axes)
        whole = next(
            (i for i, a in enumerate(axes) if ir.sdy.AxisRefAttr(a).sub_axis_info is not None), len(axes)
        )
        shortened = ir.sdy.DimensionShardingAttr.get(axes[:whole], dim.is_closed, dim.priority)
        dims.append(dim if whole == len(axes) else shortened)
    return ir.sdy.TensorShardingAttr.get(old.mesh_or_ref, dims, old.replicated_axes, old.unreduced_axes)


def with_unreduced_axes(sharding: Sharding, axes: Sequence[ir.Attribute]) -> Sharding:
    old = ir.sdy.TensorShardingAttr(sharding)
    return ir.sdy.TensorShardingAttr.get(
        old.mesh_or_ref, old.dimension_shardings, old.replicated_axes, list(axes)
    )
