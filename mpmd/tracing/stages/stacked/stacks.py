"""Loops over stacked parameters: each stage takes its own rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from mpmd.errors import ConfigError
from mpmd.tracing.stages.items import FlatFunction, Item
from mpmd.tracing.stages.select.selectors import Selector

Range = tuple[int, int, int]
"""(first row, end, stage)."""


class SlicedStacks:
    """Slices of rows of stacks.

    Attributes:
        slices: the items that take rows, with the first and the end.
        stacks: the parameters that they take rows of.
        length: rows of each stack.
    """

    def __init__(
        self, flat: FlatFunction, sources: Mapping[int, set[int]], computed: Collection[Item]
    ) -> None:
        """Finds them.

        Args:
            flat: a function before it is divided.
            sources: values that are stacks, or have their rows → the stacks.
            computed: the items that compute of stacks alone.
        """
        self.flat, self.sources, self.computed = flat, sources, computed
        _split_unstacked(flat, sources)
        self.slices: dict[Item, tuple[int, int]] = {}
        for item in flat.items:
            if item.equation.primitive.name in _TAKES_ROWS and item.reads and item.reads[0] in sources:
                rows = _rows_of(item)
                if rows is not None and rows[1] - rows[0] < flat.avals[item.reads[0]].shape[0]:
                    self.slices[item] = rows
        self.stacks = set[int]().union(*(sources[item.reads[0]] for item in self.slices))
        self.length = max((flat.avals[item.reads[0]].shape[0] for item in self.slices), default=0)

    def divide(self, selector: Selector) -> tuple[list[Range], dict[int, int], set[Item]]:
        """Lets each stage slice its own part of the stacks.

        Returns:
            The ranges of the rows, in order; the stage of each part; the items that compute of parts alone.

        Raises:
            ConfigError: the rows of a stage are not next to each other, or a slice has rows of several.
        """
        ranges = self._ranges(selector)
        made: dict[tuple[int, int], int] = {}  # a stack and a stage → the part
        parts: dict[int, int] = {}
        for item, (begin, end) in self.slices.items():
            found = [of for of in ranges if of[0] <= begin and end <= of[1]]
            if not found:
                raise ConfigError(
                    f"{item.where} takes rows {begin} to {end - 1} of a stack, which are of several stages\n"
                    "  use lengths= to keep them together"
                )
            first, last, stage = found[0]
            stack = item.reads[0]
            if (stack, stage) not in made:
                made[stack, stage] = self._part(item, stack, first, last)
                parts[made[stack, stage]] = stage
            item.inputs = [made[stack, stage]]
            item.compute = _taking(item.equation, begin - first, end - first)
        return ranges, parts, self._of_parts(parts)

    def _ranges(self, selector: Selector) -> list[Range]:
        first_use = self._first_uses()
        order = sorted(range(self.length), key=lambda row: (first_use.get(row, math.inf), row))
        stages = dict(zip(order, selector.stages_of(self.length), strict=True))
        found, begin = [], 0
        for stage, run in itertools.groupby(range(self.length), key=stages.__getitem__):
            end = begin + len(list(run))
            found.append((begin, end, stage))
            begin = end
        if len({stage for _, _, stage in found}) < len(found):
            raise ConfigError(
                f"{selector} needs layers whose rows are next to each other in the stack, but they run in "
                f"the order {', '.join(map(str, order))}"
            )
        return found

    def _first_uses(self) -> dict[int, int]:
        """The position of the first item that reads data, and values of each row."""
        rows_of: dict[int, set[int]] = {}
        found: dict[int, int] = {}
        for position, item in enumerate(self.flat.items):
            if item in self.slices:
                rows_of[item.outputs[0]] = set(range(*self.slices[item]))
                continue
            read = set[int]().union(*(rows_of.get(v, ()) for v in item.reads))
            if item in self.computed:
                rows_of.update(dict.fromkeys(item.outputs, read))
            else:
                for row in read:
                    found.setdefault(row, position)
        return found

    def _part(self, item: Item, stack: int, begin: int, end: int) -> int:
        """The value of the rows of a stage, sliced before the item."""
        aval = self.flat.avals[stack]
        part = self.flat.value(aval.update(shape=(end - begin, *aval.shape[1:])))
        compute = lambda rows: [jax.lax.slice_in_dim(rows, begin, end)]  # noqa: E731
        own = Item(compute, [stack], [part], item.equation, stays_out=True, rows=(begin, end))
        self.flat.items.insert(self.flat.items.index(item), own)
        return part

    def _of_parts(self, parts: Mapping[int, int]) -> set[Item]:
        values, found = set(parts), set[Item]()
        for item in self.flat.items:
            made_part = not values.isdisjoint(item.outputs)
            if made_part or (item in self.computed and not values.isdisjoint(item.reads)):
                values.update(item.outputs)
                found.add(item)
        return found


_TAKES_ROWS = ("slice", "unstack")


def _rows_of(item: Item) -> tuple[int, int] | None:
    """The first row and the end that a slice takes; None if it leaves rows out between."""
    params = item.equation.params
    if item.equation.primitive.name == "unstack":
        return item.rows
    if params["strides"] is not None and params["strides"][0] != 1:
        return None
    return params["start_indices"][0], params["limit_indices"][0]


def _split_unstacked(flat: FlatFunction, sources: Mapping[int, set[int]]) -> None:
    """An item for each row of a stack that `jnp.unstack` returns."""
    for item in list(flat.items):
        equation = item.equation
        if equation.primitive.name != "unstack" or equation.params["axis"] or item.reads[0] not in sources:
            continue
        rows = [
            Item(
                _taking(equation, row, row + 1),
                item.inputs,
                [v],
                equation,
                item.checkpoints,
                rows=(row, row + 1),
            )
            for row, v in enumerate(item.outputs)
        ]
        at = flat.items.index(item)
        flat.items[at : at + 1] = rows


def _taking(equation: Any, begin: int, end: int) -> Callable[..., Sequence[Any]]:
    """Takes rows of a part, and the same of other dims."""
    if equation.primitive.name == "unstack":
        return lambda rows: [rows[begin]]
    params = equation.params
    starts, limits = params["start_indices"][1:], params["limit_indices"][1:]
    return lambda rows: [jax.lax.slice(rows, (begin, *starts), (end, *limits), params["strides"])]
