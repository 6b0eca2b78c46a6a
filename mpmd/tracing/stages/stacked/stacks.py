"""Loops over stacked parameters: each stage takes its own rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from mpmd.errors import ConfigError
from mpmd.jax_compat import as_of, scan_counts, without_dead_code
from mpmd.tracing.stages.items import FlatFunction, Item, ItemEmission
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


def scan_rows_of_indexed_stacks(flat: FlatFunction, sources: Mapping[int, set[int]]) -> None:
    """Writes loops that index stacks as scans over their rows.

    Args:
        flat: a function before its scans are divided.
        sources: values that are stacks, or have their rows → the stacks.
    """
    for item in list(flat.items):
        if item.equation.primitive.name == "scan":
            constants = item.inputs[: scan_counts(item.equation.params)[0]]
            stacks = [p for p, v in enumerate(constants) if isinstance(v, int) and v in sources]
            if stacks:
                _Loop(flat, item).take_rows(stacks)


class _Loop:
    """A scan with stacks among its constants."""

    def __init__(self, flat: FlatFunction, scan: Item) -> None:
        self.flat, self.scan, self.params = flat, scan, scan.equation.params
        self.constants, self.carried = scan_counts(self.params)
        self.body = FlatFunction(self.params["jaxpr"])
        self.has_rows = len(scan.inputs) > self.constants + self.carried or len(scan.outputs) > self.carried

    def take_rows(self, stacks: list[int]) -> None:
        """Replaces the loop, if its iterations read a row each of some of its constants."""
        read = self._indices({self.body.inputs[p]: p for p in stacks})
        length = self.params["length"]
        chosen: dict[int, list[Item]] = {}
        reverse = self.params["reverse"]
        for p in stacks:
            rows = read.get(p)
            if rows is None or self._aval(p).shape[0] != length:
                continue
            if not self.has_rows and not chosen:
                reverse = next(iter(rows.values()))[0] != 0
            wanted = list(range(length))[:: -1 if reverse else 1]
            if all(indices == wanted for indices in rows.values()):
                chosen[p] = list(rows)
        if chosen:
            self._replace(chosen, reverse)

    def _indices(self, stacks: dict[int, int]) -> dict[int, dict[Item, list[int]]]:
        """For each stack that is only indexed: its slices, and the row that each takes in every iteration."""
        slices: dict[int, list[Item]] = {p: [] for p in stacks.values()}
        readers = self.body.readers()
        for v, p in stacks.items():
            if readers[v] and all(_is_row(item, v) for item in readers[v]):
                slices[p] = readers[v]
        taken: dict[int, dict[Item, list[int]]] = {
            p: {i: [] for i in own} for p, own in slices.items() if own
        }
        state = self._known_state()
        known = self._computed_of(state)
        with jax.ensure_compile_time_eval():
            for _ in range(self.params["length"]):
                env: dict[int, Any] = {**state, **self.body.constants}
                for item in known:
                    values = [env[v] if isinstance(v, int) else v.val for v in item.inputs]
                    env.update(zip(item.outputs, item.compute(*values), strict=True))
                for p, own in list(taken.items()):
                    for item, rows in own.items():
                        starts = [env.get(v) if isinstance(v, int) else v.val for v in item.inputs[1:]]
                        if starts[0] is None or any(start is None or int(start) for start in starts[1:]):
                            taken.pop(p, None)
                            break
                        rows.append(int(starts[0]))
                state = {v: self._after(v, env) for v in state}
        return taken

    def _known_state(self) -> dict[int, Any]:
        """The carried values that are known in each iteration, with their first values: counters."""
        carry = self.scan.inputs[self.constants : self.constants + self.carried]
        inside = self.body.inputs[self.constants : self.constants + self.carried]
        state = {v: first.val for v, first in zip(inside, carry) if isinstance(first, Literal)}
        while True:
            made = {v for item in self._computed_of(state) for v in item.outputs} | set(state)
            kept = {
                v: first
                for v, first in state.items()
                if isinstance(end := self._end(v), Literal) or end in made
            }
            if len(kept) == len(state):
                return kept
            state = kept

    def _computed_of(self, state: Mapping[int, Any]) -> list[Item]:
        known, found = set(state) | set(self.body.constants), []
        for item in self.body.items:
            if known.issuperset(item.reads) and not item.equation.effects:
                known.update(item.outputs)
                found.append(item)
        return found

    def _end(self, v: int) -> Any:
        """What a carried value is at the end of an iteration."""
        return self.body.outputs[self.body.inputs.index(v) - self.constants]

    def _after(self, v: int, env: Mapping[int, Any]) -> Any:
        end = self._end(v)
        return end.val if isinstance(end, Literal) else env[end]

    def _aval(self, position: int) -> Any:
        operand = self.scan.inputs[position]
        return self.flat.avals[operand] if isinstance(operand, int) else operand.aval

    def _replace(self, chosen: dict[int, list[Item]], reverse: bool) -> None:
        """Puts a scan over the rows of the chosen constants in place of the loop."""
        body, own_rows = self.body, []
        for p, slices in chosen.items():
            aval = self._aval(p)
            own_rows.append(body.value(aval.update(shape=aval.shape[1:])))
            for item in slices:
                row = Item(_as_slice, own_rows[-1:], item.outputs, item.equation, item.checkpoints)
                body.items[body.items.index(item)] = row
        emission = ItemEmission(body)
        ends = self.constants, self.constants + self.carried
        readers = self.flat.readers()
        used = [i for i, v in enumerate(self.scan.outputs) if readers[v] or v in self.flat.outputs]

        def loop(*values: Any) -> list[Any]:
            def iteration(carry: list[Any], rows: Any) -> tuple[list[Any], list[Any]]:
                given, taken = rows
                env = {**body.constants, **dict(zip(body.inputs, [*values[: ends[0]], *carry, *given]))}
                env.update(zip(own_rows, taken, strict=True))
                emission.compute(body.items, env, 0)
                made = [env[v] if isinstance(v, int) else v.val for v in body.outputs]
                return made[: self.carried], made[self.carried :]

            rows = list(values[ends[1] :]), [values[p] for p in chosen]
            start, options = list(values[ends[0] : ends[1]]), (self.params["length"], reverse)
            final, stacked = jax.lax.scan(iteration, start, rows, *options, self.params["unroll"])
            made = [*final, *stacked]
            return [made[i] for i in used]

        avals = [self._aval(p) for p in range(len(self.scan.inputs))]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        with as_of(self.scan.equation):
            closed = jax.make_jaxpr(loop)(*shapes)
        needed = without_dead_code(closed.jaxpr)  # as counters are not, for which no other reads them
        flat, scan = self.flat, self.scan
        inputs = [v for variable, v in zip(closed.jaxpr.invars, scan.inputs) if variable in needed.invars]
        made, outputs = flat.inlined(closed.replace(jaxpr=needed), inputs, scan.checkpoints, "")
        at = flat.items.index(scan)
        flat.items[at : at + 1] = made
        flat.replace(dict(zip([scan.outputs[i] for i in used], outputs)))


def _is_row(item: Item, stack: int) -> bool:
    """Whether an item takes one row of a stack, at an index."""
    if item.equation.primitive.name != "dynamic_slice" or item.inputs[0] != stack:
        return False
    sizes, shape = item.equation.params["slice_sizes"], item.equation.invars[0].aval.shape
    return bool(tuple(sizes) == (1, *shape[1:]))


def _as_slice(row: Any) -> list[Any]:
    return [row[None]]
