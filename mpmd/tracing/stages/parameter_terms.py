"""Terms of the loss in stacked parameters alone, such as a decay of the weights, part by part.

    sum(stack ** 2)  ->  sum(rows 0:2 of stack ** 2) + sum(rows 2:4 of stack ** 2)

The terms of each part are computed in its stage: a scalar of each is sent, and no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from mpmd.tracing.stages.interpreter import PartwiseInterpreter
from mpmd.tracing.stages.items import FlatFunction, Item, numbers
from mpmd.tracing.stages.part_rules import FROM_ARRAYS, RULES
from mpmd.tracing.stages.stacked import Stacked

Range = tuple[int, int, int]
"""(first row, end, stage)."""


def divide_terms(
    flat: FlatFunction, computed: Collection[Item], stacks: Mapping[int, Sequence[Range]]
) -> tuple[dict[int, int], dict[str, None]]:
    """Divides values that are computed of stacks, and are not stacks themselves.

    Args:
        flat: gets the terms of the parts in place of the stacks'.
        computed: the items that compute from parameters alone, stacks among them.
        stacks: the ranges of each stacked parameter, in the order of the rows.

    Returns:
        The stage of each value that has the rows of a part; a text for each equation that joins parts.
    """
    stage_of: dict[int, int] = {}
    joined: dict[str, None] = {}
    for result in _results(flat, computed, stacks):
        needed = _needed(computed, result)
        if any(item.equation.primitive.name in _OF_OTHER_DERIVATIVES for item in needed):
            continue
        term = _Term(flat, needed, stacks)
        stage_of.update(term.stage_of)
        joined.update(term.replace(result))
    return stage_of, joined


_OF_OTHER_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
"""Calls that the rules of parts inline, which is right after differentiation only."""


def _results(flat: FlatFunction, computed: Collection[Item], stacks: Mapping[int, Any]) -> list[int]:
    """The values that other items, or results of the function, read, and that have no rows of a stack."""
    lengths = {ranges[-1][1] for ranges in stacks.values()}
    read = {v for item in flat.items if item not in computed for v in item.reads}
    read.update(numbers(flat.outputs))
    made = [v for item in flat.items if item in computed for v in item.outputs]
    return [v for v in made if v in read and flat.avals[v].shape[:1] not in {(n,) for n in lengths}]


def _needed(computed: Collection[Item], result: int) -> list[Item]:
    """The items that a result depends on, in program order."""
    wanted, found = {result}, []
    for item in reversed(list(computed)):
        if not wanted.isdisjoint(item.outputs):
            wanted.update(item.reads)
            found.append(item)
    return found[::-1]


class _Term:
    """A value that some items compute of stacks.

    Attributes:
        stage_of: the stages of the parts of the stacks that they read.
    """

    def __init__(self, flat: FlatFunction, items: list[Item], stacks: Mapping[int, Sequence[Range]]) -> None:
        self.flat, self.items = flat, items
        self.stage_of: dict[int, int] = {}
        self._slices: list[Item] = []
        self._given: dict[int, list[int]] = {}  # what the items read → the parts of it, or itself
        self._divisions = {v: [end - begin for begin, end, _ in ranges] for v, ranges in stacks.items()}
        inside = {v for item in items for v in item.outputs}
        for v in dict.fromkeys(v for item in items for v in item.reads if v not in inside):
            self._given[v] = [self._slice(v, *of_part) for of_part in stacks[v]] if v in stacks else [v]

    def replace(self, result: int) -> dict[str, None]:
        """Puts the items of the parts after the whole's; returns a text for each that joins parts."""
        interpreter = PartwiseInterpreter(RULES, FROM_ARRAYS, list(self._divisions.values()))

        def of_parts(*values: Any) -> Any:
            rest = iter(values)
            env: dict[int, Any] = {}
            for v, parts in self._given.items():
                own = [next(rest) for _ in parts]
                env[v] = Stacked(own) if v in self._divisions else own[0]
            for item in self.items:
                read = [env[v] if isinstance(v, int) else v.val for v in item.inputs]
                env.update(zip(item.outputs, interpreter.evaluate(item.equation, read), strict=True))
            return interpreter.joined_value(env[result])

        flat, last = self.flat, self.items[-1]
        inputs = [v for parts in self._given.values() for v in parts]
        shapes = [jax.ShapeDtypeStruct(flat.avals[v].shape, flat.avals[v].dtype) for v in inputs]
        made, (output,) = flat.inlined(
            jax.make_jaxpr(of_parts)(*shapes), inputs, last.checkpoints, last.scope
        )
        at = flat.items.index(last) + 1
        flat.items[at:at] = [*self._slices, *made]
        flat.replace({result: output})
        return interpreter.joined

    def _slice(self, stack: int, begin: int, end: int, stage: int) -> int:
        aval = self.flat.avals[stack]
        part = self.flat.value(aval.update(shape=(end - begin, *aval.shape[1:])))
        compute = lambda rows: [jax.lax.slice_in_dim(rows, begin, end)]  # noqa: E731
        like = self.items[0].equation
        self._slices.append(Item(compute, [stack], [part], like, stays_out=True, rows=(begin, end)))
        self.stage_of[part] = stage
        return part
