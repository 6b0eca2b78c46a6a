"""Shardings while they are attributes: queries, comparison, and updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpmd import ir
from mpmd.sharding.shards import axes_by_dim, on_sdy_mesh

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
