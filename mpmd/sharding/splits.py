"""Splits: how the dims of values lie over the axes of a mesh, by name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mpmd import ir
from mpmd.sharding.shards import axes_by_dim

Split = tuple[tuple[str, ...], ...]
"""For each dim the axes that split it, the outermost first."""


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
    found: dict[str, int] = {}
    for dim, of_dim in enumerate(split):
        inner = list(itertools.takewhile(lambda axis: axis in axes, reversed(of_dim)))
        if set(of_dim) & set(axes) <= set(inner):
            found.update(dict.fromkeys(reversed(inner), dim))
    return found


def text_of(split: Split, mesh: str) -> str:
    """A split as the sharding of a type."""
    dims = ("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in split)
    return f"<{mesh}, [{', '.join(dims)}]>"


def sharding_of(split: Split, mesh: str) -> ir.Attribute:
    """A split as an attribute."""
    return ir.Attribute.parse("#sdy.sharding" + text_of(split, mesh), ir.context())
