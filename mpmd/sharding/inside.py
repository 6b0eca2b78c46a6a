"""How the values inside of a fragment are split, by Shardy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpmd import ir
from mpmd.sharding.shards import axes_by_dim

Split = tuple[tuple[str, ...], ...]
"""For each dim the axes that split it, the outermost first."""

_SHARDING = "sdy.sharding"
_NUMBER = "mpmd.number"
PROPAGATE = (
    "sdy-import-pipeline,sdy-user-priority-propagate,func.func(sdy-sink-func-data-flow-edges),"
    "func.func(sdy-sink-data-flow-edges),sdy-close-shardings"
)


def split_of(sharding: ir.Attribute | None, rank: int) -> Split:
    """A sharding as the names of axes; a part of an axis has a name that no axis has."""
    if sharding is None:
        return ((),) * rank
    return tuple(tuple(_axis_name(axis) for axis in dim) for dim in axes_by_dim(sharding))


def split_axes(split: Split) -> frozenset[str]:
    """All axes of a split."""
    return frozenset(axis for dim in split for axis in dim)


def _axis_name(axis: Any) -> str:
    return str(axis.name) if axis.sub_axis_info is None else str(axis)


def number_ops(fragment: ir.Fragment) -> None:
    """Numbers the ops in a body, which then are known after Shardy has added others."""
    for number, op in enumerate(ir.walk(fragment)):
        ir.put(op, _NUMBER, ir.i64(number))


def splits_inside(
    propagated: ir.Fragment, body: ir.Fragment, operands: Sequence[ir.Type]
) -> dict[ir.Value, Split]:
    """The splits of the values in the body of a fragment; a value that is whole may be missing.

    Args:
        propagated: a copy of it whose ops were numbered, after Shardy.
        body: the fragment.
        operands: the types of its operands, with their shardings.
    """
    found: dict[int, list[Split]] = {}
    for op in ir.walk(propagated):
        if _NUMBER in op.attributes and _SHARDING in op.attributes:
            found[int(ir.IntegerAttr(op.attributes[_NUMBER]).value)] = _splits_of(op)
    splits: dict[ir.Value, Split] = {}
    for arg, kind in zip(body.args, operands):
        splits[arg] = split_of(kind.sharding, len(kind.shape))
    for number, op in enumerate(ir.walk(body)):
        of_results = found.get(number, [])
        splits.update(zip(op.results, of_results))
        if op.operation.name == "stablehlo.while":
            for region in op.operation.regions:
                splits.update(zip(region.blocks[0].arguments, of_results))
    return splits


def _splits_of(op: ir.Op) -> list[Split]:
    attribute = op.attributes[_SHARDING]
    if ir.sdy.TensorShardingPerValueAttr.isinstance(attribute):
        shardings = list(ir.sdy.TensorShardingPerValueAttr(attribute).shardings)
    else:
        shardings = [attribute]
    return [split_of(s, 0) for s in shardings]


def splits_of_copy(
    splits: Mapping[ir.Value, Split], fragment: ir.Fragment, copy: ir.Fragment
) -> dict[ir.Value, Split]:
    """The splits of the values in the body of a copy."""
    found = {}
    for old, new in zip([fragment, *ir.walk(fragment)], [copy, *ir.walk(copy)], strict=True):
        pairs = list(zip(old.results, new.results))
        for one, other in zip(old.operation.regions, new.operation.regions):
            for block, own in zip(one.blocks, other.blocks):
                pairs += zip(block.arguments, own.arguments)
        found.update({own: splits[value] for value, own in pairs if value in splits})
    return found
