"""Arguments of a call in the parts that its program takes: whole arrays are divided, other parts joined."""

from __future__ import annotations

from typing import Any

import jax

from mpmd.api.signature import Arguments
from mpmd.tracing.stages.stacked import Stacked, in_parts, is_stacked
from mpmd.tracing.stages.stage_axis import of_axis


def in_wholes(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments with shapes and dtypes of whole arrays for those that are `Stacked`."""

    def whole(value: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in value.parts]
        return Stacked(shapes, value.dim).whole()

    given: tuple[Any, Any] = jax.tree.map(
        lambda v: whole(v) if is_stacked(v) else v, (args, kwargs), is_leaf=is_stacked
    )
    return given


def fitted(expected: Arguments, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, `Stacked` where the program expects parts.

    A whole array that the call may consume is deleted: its parts are copies.

    Args:
        expected: those that a program was traced for.
        args: positional arguments that are not static.
        kwargs: likewise keywords.
    """
    wanted = jax.tree.unflatten(expected.tree, range(len(expected.leaves)))
    slots = jax.tree.leaves(wanted, is_leaf=is_stacked)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_stacked)
    if len(leaves) != len(slots):
        return args, kwargs  # another structure, which is reported later
    donated = set(expected.donated)
    made: tuple[Any, Any] = jax.tree.unflatten(
        tree, [_fitted(value, slot, expected.leaves, donated) for value, slot in zip(leaves, slots)]
    )
    return made


def _fitted(value: Any, slot: Any, leaves: list[Any], donated: set[int]) -> Any:
    if not is_stacked(slot):
        return value.whole() if is_stacked(value) else value
    lengths = tuple(leaves[i].shape[slot.dim] for i in slot.parts)
    if is_stacked(value):
        if (value.dim, value.lengths) == (slot.dim, lengths):
            return value
        value = value.whole()
    if not hasattr(value, "shape") or value.shape[slot.dim : slot.dim + 1] != (sum(lengths),):
        return value  # reported later
    shards = of_axis(value, slot.dim, len(lengths)) if len(set(lengths)) == 1 else None
    if shards is not None:
        return Stacked(shards, slot.dim)
    parts = in_parts(value, lengths, slot.dim)
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if is_array and len(lengths) > 1 and slot.parts[0] in donated:
        value.delete()
    return parts
