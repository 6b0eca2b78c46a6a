"""Values with rows of a stack, which the loss reshaped, sliced or cast, and loops of loops over them.

    blocks = stack.reshape(2, 4, d, d)       rows 0:8 of the stack, four in each row of its own
    block = blocks[1]                        rows 4:8, one in each
    block.astype(bfloat16)                   the same rows, cast

A scan over such a value runs over rows of the stack, so that the stack is divided and not the value.  A scan
whose body scans becomes its iterations, one after the other: then the loops inside of it may be divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from mpmd.jax_compat import inner_jaxprs, rebind, scan_counts, struct_of
from mpmd.tracing.stages.items import FlatFunction, Item, Operand, numbers
from mpmd.tracing.stages.select.placement import size
from mpmd.tracing.stages.stacked.part_rules import ELEMENTWISE
from mpmd.tracing.stages.stacked.stacked import Range, rows_of


@dataclasses.dataclass(frozen=True)
class RowView:
    """A value that has rows of a stack, in their order.

    Attributes:
        stack: the parameter.
        begin: its first row.
        each: how many rows of the stack are one row of the value.
        shape: of the value.
        casts: elementwise operations on the rows, one after the other.
    """

    stack: int
    begin: int
    each: int
    shape: tuple[int, ...]
    casts: tuple[Item, ...] = ()

    def rows(self, begin: int, end: int) -> tuple[int, int]:
        """The rows of the stack in a range of rows of the value."""
        return self.begin + begin * self.each, self.begin + end * self.each

    def of_rows(self, rows: Any) -> Any:
        """Rows of the value, of the rows of the stack that they have."""
        for item in self.casts:
            operands = [rows if isinstance(operand, int) else operand.val for operand in item.inputs]
            (rows,) = rebind(item.equation, operands)
        return jnp.reshape(rows, (rows.shape[0] // self.each, *self.shape[1:]))


def row_views(flat: FlatFunction, stacks: Collection[int]) -> dict[int, RowView]:
    """The values that have whole rows of stacks, next to each other: by number, the stacks among them."""
    views = {v: RowView(v, 0, 1, tuple(flat.avals[v].shape)) for v in stacks if flat.avals[v].shape}
    for item in flat.items:
        if len(item.outputs) == 1 and len(item.reads) == 1 and item.reads[0] in views:
            found = _viewed(views[item.reads[0]], item)
            if found is not None:
                views[item.outputs[0]] = found
    return views


def _viewed(view: RowView, item: Item) -> RowView | None:
    """What an operation on rows makes of them, if its result has rows of the stack again."""
    name, params, shape = item.equation.primitive.name, item.equation.params, view.shape
    new = tuple(item.equation.outvars[0].aval.shape)
    if name in ELEMENTWISE and new == shape:
        return dataclasses.replace(view, casts=(*view.casts, item))
    if name == "squeeze" or (name == "reshape" and params["dimensions"] is None):
        rows = view.each * shape[0]
        if new and new[0] and rows % new[0] == 0:
            return dataclasses.replace(view, each=rows // new[0], shape=new)
    if name == "slice" and new[1:] == shape[1:] and set(params["strides"] or (1,)) == {1}:
        begin = view.begin + params["start_indices"][0] * view.each
        return dataclasses.replace(view, begin=begin, shape=new)
    return None


def scanned_rows(scan: Item) -> list[int]:
    return numbers(scan.inputs[sum(scan_counts(scan.equation.params)) :])


def views_scanned(
    flat: FlatFunction, sources: Mapping[int, set[int]], computed: Mapping[Item, None], stacks: set[int]
) -> dict[Item, set[int]]:
    """The scans over views of stacks, and which stacks they are.

    Every row of such a stack is read by one scan, once, and nothing but scans reads views of it, so that the
    parts of the scans are all that there is of it.
    """
    views = row_views(flat, stacks)
    derived = {v: {v} for v in stacks}
    for item in computed:
        made = set[int]().union(*(derived.get(v, ()) for v in item.reads))
        derived.update(dict.fromkeys(item.outputs, made))
    scans = {
        item: [v for v in scanned_rows(item) if item.reads.count(v) == 1]
        for item in flat.items
        if item.equation.primitive.name == "scan" and item not in computed
    }
    read: dict[int, list[tuple[int, int]]] = {}
    refused = {views[v].stack for v in numbers(flat.outputs) if v in views}
    for item in flat.items:
        rows = scans.get(item, [])
        for v in dict.fromkeys(item.reads) if item not in computed else ():
            if v in views and v in rows and v not in sources:
                view = views[v]
                read.setdefault(view.stack, []).append(view.rows(0, view.shape[0]))
            else:
                is_large = {s for s in derived.get(v, ()) if size(flat.avals[v]) > _row_size(flat, s)}
                refused |= derived.get(v, set()) if item in scans else is_large
    whole = {
        stack
        for stack, ranges in read.items()
        if stack not in refused and _tile(sorted(ranges), flat.avals[stack].shape[0])
    }
    found = {scan: {views[v].stack for v in rows if v in views} & whole for scan, rows in scans.items()}
    return {scan: of for scan, of in found.items() if of}


def _row_size(flat: FlatFunction, stack: int) -> int:
    aval = flat.avals[stack]
    return size(aval) // max(1, aval.shape[0]) if aval.shape else 0


def _tile(ranges: Sequence[tuple[int, int]], end: int) -> bool:
    """Whether ranges in order follow one another from 0 to an end."""
    return [0, *(b for _, b in ranges)] == [*(a for a, _ in ranges), end]


class StackParts:
    """The parts of stacks whose rows scans read as views.

    Attributes:
        items: that slice them.
    """

    def __init__(
        self, flat: FlatFunction, views: Mapping[int, RowView], stacks: Mapping[int, Sequence[Range]]
    ) -> None:
        self.flat, self.views, self.stacks = flat, views, stacks
        self.items: list[Item] = []
        self._parts: dict[tuple[int, Range], int] = {}

    def slice(
        self, value: Operand, begin: int, end: int, scan: Item
    ) -> tuple[Operand, Callable[..., Sequence[Any]]]:
        """What a scan slices rows of a value of, and how; of the part of a stack if the value is a view."""
        view = self.views.get(value) if isinstance(value, int) else None
        if view is None:
            return value, _taking(begin, end)
        first, last = view.rows(begin, end)
        part = next(of for of in self.stacks[view.stack] if of[0] <= first and last <= of[1])
        key = view.stack, part
        if key not in self._parts:
            self._parts[key] = with_rows(self.flat, self.flat.avals[view.stack], part[1] - part[0])
            self.items.append(
                Item(
                    _taking(*part[:2]), [view.stack], [self._parts[key]], scan.equation, stays_out=True,
                    rows=part[:2],
                )
            )  # fmt: skip
        first, last = first - part[0], last - part[0]
        return self._parts[key], lambda rows: [view.of_rows(jax.lax.slice_in_dim(rows, first, last))]


def merged(ranges: Sequence[Range]) -> list[Range]:
    """Ranges of rows in order; neighbours of one stage are one range."""
    merged: list[Range] = []
    for begin, end, stage in ranges:
        if merged and merged[-1][1:] == (begin, stage):
            begin = merged.pop()[0]
        merged.append((begin, end, stage))
    return merged


def with_rows(flat: FlatFunction, aval: Any, rows: int) -> int:
    return flat.value(aval.update(shape=(rows, *aval.shape[1:])))


def _taking(begin: int, end: int) -> Callable[..., Sequence[Any]]:
    return lambda rows: [rows_of(rows, begin, end)]


def nested_loops(items: Collection[Item]) -> list[Item]:
    """The scans whose body scans, of few iterations.

    JAX differentiates callbacks in a scan otherwise than outside of one: a scan with effects stays one.
    """
    return [
        item
        for item in items
        if item.equation.primitive.name == "scan"
        and not item.equation.effects
        and item.equation.params["length"] <= _MAX_UNROLLED
        and _scans(item.equation.params["jaxpr"].jaxpr)
    ]


_MAX_UNROLLED = 32
"""Iterations of a loop that become operations, at most: all of them are traced and compiled."""


def _scans(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name == "scan" or any(map(_scans, inner_jaxprs(equation)))
        for equation in jaxpr.eqns
    )


def unroll(flat: FlatFunction, loop: Item) -> None:
    """Replaces a scan by the operations of its iterations, in the order in which they run."""
    params = loop.equation.params
    constants, carried = scan_counts(params)
    body = jaxpr_as_fun(params["jaxpr"])

    def iterations(*values: Any) -> list[Any]:
        given, carry = values[:constants], list(values[constants : constants + carried])
        results: dict[int, list[Any]] = {}
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            rows = [jax.lax.index_in_dim(v, i, keepdims=False) for v in values[constants + carried :]]
            after = body(*given, *carry, *rows)
            carry, results[i] = after[:carried], after[carried:]
        return [*carry, *(jnp.stack(of) for of in zip(*(results[i] for i in order)))]

    avals = [flat.avals[v] if isinstance(v, int) else v.aval for v in loop.inputs]
    closed = jax.make_jaxpr(iterations)(*map(struct_of, avals))
    items, outputs = flat.inlined(closed, loop.inputs, loop.checkpoints, loop.scope)
    at = flat.items.index(loop)
    flat.items[at : at + 1] = items
    flat.replace(dict(zip(loop.outputs, outputs, strict=True)))
