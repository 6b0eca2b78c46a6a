"""A scan over stacked layers as one scan per stage, each over its own range of the layers.

Terms of the loss in stacked parameters alone, such as a decay of the weights, are divided as well:

    sum(stack ** 2)  ->  sum(rows 0:2 of stack ** 2) + sum(rows 2:4 of stack ** 2)

Each part is computed in its stage, so that a scalar is sent instead of rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from mpmd.errors import ConfigError
from mpmd.jax_compat import rebind, scan_counts
from mpmd.tracing.stages.items import FlatFunction, Item, numbers
from mpmd.tracing.stages.select.selectors import Selector
from mpmd.tracing.stages.stacked.by_parts import PartwiseInterpreter
from mpmd.tracing.stages.stacked.part_rules import FROM_ARRAYS, RULES
from mpmd.tracing.stages.stacked.row_views import (
    StackParts,
    merged,
    nested_loops,
    row_views,
    scanned_rows,
    unroll,
    views_scanned,
    with_rows,
)
from mpmd.tracing.stages.stacked.stacked import Range, SlicedStacks, Stacked, joined_rows, rows_of


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
    outputs = [v for item in flat.items if item in computed for v in item.outputs]
    return [v for v in outputs if v in read and flat.avals[v].shape[:1] not in {(n,) for n in lengths}]


def _needed(computed: Collection[Item], result: int) -> list[Item]:
    """The items that a result depends on, in program order."""
    wanted, needed = {result}, []
    for item in reversed(list(computed)):
        if not wanted.isdisjoint(item.outputs):
            wanted.update(item.reads)
            needed.append(item)
    return needed[::-1]


class _Term:
    """A value that some items compute of stacks.

    Attributes:
        stage_of: the stages of the parts of the stacks that they read.
    """

    def __init__(self, flat: FlatFunction, items: list[Item], stacks: Mapping[int, Sequence[Range]]) -> None:
        self.flat, self.items = flat, items
        self.stage_of: dict[int, int] = {}
        self._slices: list[Item] = []
        self._given: dict[int, list[int]] = {}  # value that items read → the parts of it, or itself
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
        terms, (output,) = flat.inlined(
            jax.make_jaxpr(of_parts)(*shapes), inputs, last.checkpoints, last.scope
        )
        at = flat.items.index(last) + 1
        flat.items[at:at] = [*self._slices, *terms]
        flat.replace({result: output})
        return interpreter.joined

    def _slice(self, stack: int, begin: int, end: int, stage: int) -> int:
        aval = self.flat.avals[stack]
        part = self.flat.value(aval.update(shape=(end - begin, *aval.shape[1:])))
        compute = lambda rows: [rows_of(rows, begin, end)]  # noqa: E731
        like = self.items[0].equation
        self._slices.append(Item(compute, [stack], [part], like, stays_out=True, rows=(begin, end)))
        self.stage_of[part] = stage
        return part


@dataclasses.dataclass(frozen=True)
class Division:
    """How the stacked parameters of a function are divided.

    Attributes:
        stacks: the stacked parameters.
        lengths: the path and the rows of each → the lengths of its parts.
        stage_of: values that have the rows of one part, and are computed from parameters alone → its stage.
        joined: a text for each equation that joins parts of parameters.
    """

    stacks: frozenset[int]
    lengths: dict[tuple[str, int], list[int]]
    stage_of: dict[int, int]
    joined: dict[str, None]


def divide_scans(flat: FlatFunction, paths: Mapping[int, str], selector: Selector) -> Division:
    """Divides scans over the parameters that a selector matches, and what follows from these alone.

    Args:
        flat: its items have no stages.
        paths: the path of each value that is a parameter.
        selector: its patterns match stacked parameters.

    Raises:
        ConfigError: a pattern matches nothing, or no scan runs over what it matches.
    """
    selector.check_matches(list(paths.values()))
    stacks = {v for v, path in paths.items() if selector.matches(path)}
    if slices := _divided_slices(flat, paths, stacks, selector):
        return slices
    while scans := scans_over(flat, stacks, set(paths)):
        own, loops = _stages_of_iterations(flat, scans, selector)
        if not loops:
            return divide_by_stages(flat, paths, scans, own)
        for loop in loops:
            unroll(flat, loop)
    raise ConfigError(_no_scan(flat, paths, selector))


def _stages_of_iterations(
    flat: FlatFunction, scans: Mapping[Item, set[int]], selector: Selector
) -> tuple[dict[Item, list[int]], list[Item]]:
    """The stage of each iteration; or the loops of loops to unroll, as one iteration is in several stages.

    Raises:
        ConfigError: the lengths divide the layers of one iteration, and no loop inside of it runs them.
    """
    views = row_views(flat, set[int]().union(*scans.values()))
    length = {scan: int(scan.equation.params["length"]) for scan in scans}
    each = {scan: max((views[v].each for v in scanned_rows(scan) if v in views), default=1) for scan in scans}
    of_layers = _stages_of_layers(flat, scans, selector, {s: length[s] * each[s] for s in scans})
    stages = {
        scan: [set(own[i : i + each[scan]]) for i in range(0, len(own), each[scan])]
        for scan, own in of_layers.items()
    }
    across = [scan for scan, own in stages.items() if any(len(of) > 1 for of in own)]
    loops = nested_loops(across)
    if loops:
        return {}, loops
    if across and selector.lengths:
        raise ConfigError(
            f"{selector} has lengths {list(selector.lengths)}, but an iteration of {across[0].where} runs "
            f"{each[across[0]]} layers, and is in one stage\n  use lengths that keep them together, or write "
            "a scan over these layers inside of it"
        )
    if across:
        return _stages_of_layers(flat, scans, selector, length), []
    return {scan: [max(of) for of in own] for scan, own in stages.items()}, []


def _stages_of_layers(
    flat: FlatFunction, scans: Mapping[Item, set[int]], selector: Selector, counts: Mapping[Item, int]
) -> dict[Item, list[int]]:
    """The stage of each layer: layers of several scans follow one another.

    Not so beside a scan, neither before nor after it: the same layers on other data are in the same stages,
    and a model that the function closes over, such as a teacher, is divided by itself.

    Args:
        flat: has the scans.
        scans: the stacks of each.
        selector: has the lengths.
        counts: how many layers each scan has.
    """
    trained = [scan for scan, stacks in scans.items() if not flat.constants.keys() >= stacks]
    apart = {scan for scan in scans if scan not in trained and _is_beside(flat, scan, trained)}
    follow: list[Item] = []
    twins: dict[Item, Item] = {}
    for scan in scans:
        same = [other for other in follow if scans[other] == scans[scan]]
        if scan not in apart and same and _is_beside(flat, scan, same[:1]):
            twins[scan] = same[0]
        elif scan not in apart:
            follow.append(scan)
    stages = iter(selector.stages_of(sum(counts[scan] for scan in follow)) if follow else ())
    own = {scan: list(itertools.islice(stages, counts[scan])) for scan in follow}
    own |= {scan: own[twin] for scan, twin in twins.items()}
    own |= {scan: selector.stages_beside(counts[scan]) for scan in apart}
    return {scan: own[scan] for scan in scans}


def _is_beside(flat: FlatFunction, scan: Item, others: Collection[Item]) -> bool:
    """Whether a scan and others, if there are some, do not read results of each other."""
    return bool(others) and not any(_depends(flat, scan, o) or _depends(flat, o, scan) for o in others)


def _depends(flat: FlatFunction, item: Item, on: Item) -> bool:
    """Whether an item reads results of another one, directly or not."""
    made = set(on.outputs)
    for other in flat.items:
        if not made.isdisjoint(other.reads):
            made.update(other.outputs)
    return not made.isdisjoint(item.reads)


def _divided_slices(
    flat: FlatFunction, paths: Mapping[int, str], stacks: set[int], selector: Selector
) -> Division | None:
    """Divides stacks whose rows a loop of Python slices; None if there are scans over them, or no slices."""
    sources, computed = _stack_values(flat, stacks, set(paths))
    if _rows_scanned(flat, sources) or views_scanned(flat, sources, computed, stacks):
        return None
    sliced = SlicedStacks(flat, sources, computed)
    if not sliced.slices:
        return None
    ranges, stage_of, of_parts = sliced.divide(selector)
    terms = {item: None for item in flat.items if item in computed and item not in of_parts}
    for item in terms:
        item.stays_out = True
    divided = dict.fromkeys(sorted(sliced.stacks), ranges)
    own, joined = divide_terms(flat, terms, divided)
    return Division(frozenset(divided), _lengths(divided, paths), stage_of | own, joined)


def _lengths(
    divided: Mapping[int, Sequence[Range]], paths: Mapping[int, str]
) -> dict[tuple[str, int], list[int]]:
    return {
        (paths[v], ranges[-1][1]): [end - begin for begin, end, _ in ranges] for v, ranges in divided.items()
    }


def divide_by_stages(
    flat: FlatFunction,
    paths: Mapping[int, str],
    scans: Mapping[Item, Collection[int]],
    stages: Mapping[Item, Sequence[int]],
) -> Division:
    """Divides scans over stacked parameters, and what follows from these alone.

    Args:
        flat: has the scans.
        paths: the path of each value that is a parameter.
        scans: the stacked parameters of each scan.
        stages: the stage of each iteration, in the order in which they run.
    """
    stacks = set[int]().union(*scans.values())
    sources, computed = _stack_values(flat, stacks, set(paths))
    as_they_are = {stack for scan in scans for v in scanned_rows(scan) for stack in sources.get(v, ())}
    views = {v: view for v, view in row_views(flat, stacks).items() if view.stack not in as_they_are}
    terms = {item: None for item in computed if item not in scans}
    divided: dict[int, list[Range]] = {v: [] for v in sorted(stacks)}
    for scan, of_scan in scans.items():
        viewed = {v: views[v] for v in scanned_rows(scan) if v in views}.values()
        of_views = {view.stack for view in viewed}
        ranges = ranges_of(stages[scan], scan.equation.params["reverse"])
        own = [(begin, end, stage) for stage, begin, end in ranges]
        divided |= {v: own for v in of_scan if v not in of_views}
        for view in viewed:
            divided[view.stack] += [(*view.rows(begin, end), stage) for stage, begin, end in ranges]
    divided = {v: merged(sorted(ranges)) for v, ranges in divided.items()}
    parts = StackParts(flat, views, divided)
    for scan in scans:
        replace_scan(flat, scan, ranges_of(stages[scan], scan.equation.params["reverse"]), parts)
    flat.items[:0] = parts.items
    found = Division(frozenset(divided), _lengths(divided, paths), *divide_terms(flat, terms, divided))
    flat.replace({})  # drops what computed whole stacks
    return found


def _stack_values(
    flat: FlatFunction, stacks: set[int], parameters: set[int]
) -> tuple[dict[int, set[int]], dict[Item, None]]:
    """The values and items that follow from stacked parameters, and from parameters alone.

    Returns:
        Values that have the rows of stacks → these stacks; the items that compute of stacks.
    """
    sources = {v: {v} for v in stacks}
    derived = dict(sources)
    constant = set(parameters)
    computed: dict[Item, None] = {}
    for item in flat.items:
        if not constant.issuperset(item.reads):
            continue
        constant.update(item.outputs)
        read = set().union(*(derived.get(v, ()) for v in item.reads))
        lengths = {flat.avals[v].shape[:1] for v in item.reads if v in sources} - {()}
        if read:
            computed[item] = None
            derived.update(dict.fromkeys(item.outputs, read))
            own = [v for v in item.outputs if flat.avals[v].shape[:1] in lengths]
            sources.update(dict.fromkeys(own, read))
    return sources, computed


def scans_over(flat: FlatFunction, stacks: set[int], parameters: set[int]) -> dict[Item, set[int]]:
    """The scans whose rows are rows of stacked parameters, and which parameters these are.

    What follows from stacks alone gets no stage: it is computed from the parts on their meshes.
    """
    sources, computed = _stack_values(flat, stacks, parameters)
    for item in computed:
        item.stays_out = True
    found = _rows_scanned(flat, sources)
    for scan, of in views_scanned(flat, sources, computed, stacks).items():
        found[scan] = found.get(scan, set()) | of
    return found


def _rows_scanned(flat: FlatFunction, sources: Mapping[int, set[int]]) -> dict[Item, set[int]]:
    stacks_of: dict[Item, set[int]] = {}
    for item in flat.items:
        if item.equation.primitive.name == "scan":
            read = set().union(*(sources.get(v, ()) for v in scanned_rows(item)))
            if read:
                stacks_of[item] = read
    return stacks_of


def _no_scan(flat: FlatFunction, paths: Mapping[int, str], selector: Selector) -> str:
    """The message for stacked parameters that no scan runs over."""
    readers = flat.readers()
    reasons = [
        f"{path} is read by {readers[v][0].where}"
        for v, path in paths.items()
        if selector.matches(path) and readers[v]
    ]
    return "\n  ".join(
        [
            f"{selector} divides a scan over stacked parameters, but no scan has rows of what it matches",
            *reasons[:4],
            "write a loop that indexes their rows as jax.lax.scan(layer, x, rows)",
            "for layers that are separate parameters use mpmd.by_parameters, for iterations that share their "
            'parameters stages="auto"',
        ]
    )


def ranges_of(stages: Sequence[int], reverse: bool) -> list[tuple[int, int, int]]:
    """(stage, first row, end) of each stage, in the order in which they run.

    Args:
        stages: the stage of each iteration, in the order in which they run.
        reverse: whether the last row runs first.
    """
    ranges, begin = [], 0
    for stage, run in itertools.groupby(stages):
        end = begin + len(list(run))
        first, last = (len(stages) - end, len(stages) - begin) if reverse else (begin, end)
        ranges.append((stage, first, last))
        begin = end
    return ranges


def replace_scan(
    flat: FlatFunction, scan: Item, ranges: Sequence[tuple[int, int, int]], stack_parts: StackParts
) -> None:
    """Replaces a scan by the slices of its rows, a scan for each range, and its stacked results.

    Args:
        flat: has the scan.
        scan: one with a length.
        ranges: (stage, first row, end), in the order in which they run.
        stack_parts: of the stacks that it reads rows of.
    """
    constants, carried = scan_counts(scan.equation.params)
    # `ranges` are in the order of execution.  In a reversed scan the first has the last rows, so the stacked
    # results are sorted by row before they are concatenated.
    carry = list(scan.inputs[constants : constants + carried])
    rows, stacked = scan.inputs[constants + carried :], scan.outputs[carried:]
    # Slices of what a stage computes are of this stage, so that only the rows of a range are sent.
    computed = {v for item in flat.items if not item.stays_out for v in item.outputs}
    replaced: list[Item] = []
    parts: list[tuple[int, list[int]]] = []
    casts = {v: item for item in flat.items for v in item.outputs if _makes_extended(item)}
    for number, (stage, begin, end) in enumerate(ranges):
        slices = []
        for row in rows:
            cast = casts.get(row) if isinstance(row, int) else None
            source = row if cast is None else cast.inputs[0]
            aval = flat.avals[source] if isinstance(source, int) else source.aval
            slices.append(with_rows(flat, aval, end - begin))
            is_stack = source not in computed
            of_stack = (begin, end) if is_stack and source not in stack_parts.views else None
            of, compute = stack_parts.slice(source, begin, end, scan)
            replaced.append(
                Item(compute, [of], slices[-1:], scan.equation, stays_out=is_stack, rows=of_stack)
            )
            if cast is not None:
                own_rows, made = slices[-1], with_rows(flat, cast.equation.outvars[0].aval, end - begin)
                replaced.append(Item(cast.compute, [own_rows], [made], cast.equation, stage=stage))
                slices[-1] = made
        last = number == len(ranges) - 1
        states = (
            # The last range defines the values that the scan did, so that its readers stay as they are.
            scan.outputs[:carried] if last else [flat.value(flat.avals[v]) for v in scan.outputs[:carried]]
        )
        own = [with_rows(flat, flat.avals[v], end - begin) for v in stacked]
        inputs, outputs = [*scan.inputs[:constants], *carry, *slices], [*states, *own]
        compute = _scanning(scan.equation, end - begin)
        replaced.append(
            Item(compute, inputs, outputs, scan.equation, scan.checkpoints, stage, iterations=end - begin)
        )
        carry = list(states)
        parts.append((begin, own))
    readers = flat.readers()
    in_order = [own for _, own in sorted(parts)]
    results = set(numbers(flat.outputs))
    for v, of_ranges in zip(stacked, zip(*in_order)):
        if not readers[v] and v not in results:
            continue
        compute = lambda *values: [joined_rows(*values)]  # noqa: E731
        replaced.append(Item(compute, of_ranges, [v], scan.equation, stays_out=not readers[v]))
    at = flat.items.index(scan)
    flat.items[at : at + 1] = replaced


def _makes_extended(item: Item) -> bool:
    """Whether an item makes an extended dtype, such as flax's fm32: JAX differentiates no slices of it."""
    return item.equation.primitive.name == "to_edtype"


def _scanning(equation: Any, length: int) -> Callable[..., Sequence[Any]]:
    return lambda *values: rebind(equation, values, length=length)
