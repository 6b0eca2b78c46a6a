"""A loop that indexes stacked parameters as a scan over their rows.

    fori_loop(0, 8, lambda i, x: layer(stack[i], x), x)  ->  scan(lambda x, row: layer(row, x), x, stack)

The index of every iteration must follow from the counters of the loop, and be the row that the scan
takes, from the first to the last or in reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import Literal

from mpmd.jax_compat import as_of, scan_counts, without_dead_code
from mpmd.tracing.stages.emit import ItemEmission
from mpmd.tracing.stages.items import FlatFunction, Item


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
