"""The stage of each item, from the stages of the parameters, which their paths or scopes give.

1. An item that reads parameters of a stage, and data, is of this stage, or of a later one that it reads.
2. Other items that read a stage are of the latest that they read.
3. Between a stage and the first that reads it the division moves to where the fewest bytes cross.
4. What only one later stage reads is of that stage, if it is sent what it is computed from anyway.
5. Everything else that only one stage reads is of this stage: embeddings, casts of parameters, targets.
6. Small values of parameters alone, such as sums for a decay of weights, are of the stage of these.

Items that remain have no stage: mesh inference places them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from mpmd.errors import ConfigError, collect
from mpmd.tracing.stages.items import FlatFunction, Item, numbers
from mpmd.tracing.stages.select.selectors import Selector


def place(flat: FlatFunction, parameters: Sequence[int], stage_of: Mapping[int, int], count: int) -> None:
    """Sets the stages of all items that have none so far.

    Args:
        flat: items with a stage keep it, or get a later one.
        parameters: the inputs that are parameters.
        stage_of: the stages of some of them.
        count: how many stages there are.
    """
    owned = _owners(flat, parameters, stage_of)
    fixed = {id(item) for item in flat.items if item.stage is not None}
    for item in flat.items:
        owners = owned.get(id(item))
        if owners and item.stage is None:
            item.stage = max(owners)
            fixed.add(id(item))
    movable = [item for item in flat.items if id(item) not in fixed and not item.stays_out]
    follow_inputs(flat)
    embedded = _embedded(flat, parameters)
    for stage in range(count - 1):
        _move_division(flat, stage, {id(item) for item in movable}, embedded)
    follow_inputs(flat)
    _compute_where_read(flat, movable)
    terms = _terms(flat, parameters)
    follow_readers(flat, terms)
    if terms:
        _place_terms(flat, terms, stage_of)
        follow_inputs(flat)
        follow_readers(flat)


_SMALL = 8
"""How many times smaller than its parameters a value is that is sent instead, for each microbatch."""


def _terms(flat: FlatFunction, parameters: Sequence[int]) -> dict[Item, set[int]]:
    """The items without a stage that compute small values of parameters alone → these parameters."""
    sources = {v: {v} for v in parameters}
    terms: dict[Item, set[int]] = {}
    for item in flat.items:
        if item.reads and all(v in sources for v in item.reads):
            read = set().union(*(sources[v] for v in item.reads))
            for v in item.outputs:
                sources.setdefault(v, read)
            read_bytes = sum(size(flat.avals[v]) for v in read)
            own_bytes = sum(size(flat.avals[v]) for v in item.outputs)
            if item.stage is None and not item.stays_out and _SMALL * own_bytes <= read_bytes:
                terms[item] = read
    return terms


def _place_terms(flat: FlatFunction, terms: Mapping[Item, set[int]], stage_of: Mapping[int, int]) -> None:
    """Places items whose parameters are all of one stage there, if their readers are not before it."""
    readers = flat.readers()

    def stage(parameter: int) -> int | None:
        others = [i for i in _final_readers(parameter, readers, terms) if i.stage is not None]
        return stage_of.get(parameter, min((i.stage or 0 for i in others), default=None))

    own = {parameter: stage(parameter) for parameter in set().union(*terms.values())}
    for item, parameters in terms.items():
        stages = {own[parameter] for parameter in parameters}
        after = [reader.stage for v in item.outputs for reader in _final_readers(v, readers)]
        first = next(iter(stages)) if len(stages) == 1 else None
        if first is not None and all(first <= (later or 0) for later in after):
            item.stage = first


def _owners(
    flat: FlatFunction, parameters: Sequence[int], stage_of: Mapping[int, int]
) -> dict[int, set[int]]:
    """The stages whose parameters each item reads; of items that read data, and not only parameters."""
    sources: dict[int, set[int]] = {v: {stage_of[v]} if v in stage_of else set() for v in parameters}
    owner_of = {}
    for item in flat.items:
        owners = set().union(*(sources.get(v, ()) for v in item.reads))
        if all(v in sources for v in item.reads):
            for v in item.outputs:
                sources.setdefault(v, owners)
        else:
            owner_of[id(item)] = owners
    return owner_of


def follow_inputs(flat: FlatFunction) -> None:
    """Items that read a stage have this stage or a later one."""
    stage_of: dict[int, int] = {}
    for item in flat.items:
        read = [stage_of[v] for v in item.reads if v in stage_of]
        if item.stays_out:
            continue
        if read:
            item.stage = max(read) if item.stage is None else max(item.stage, *read)
        if item.stage is not None:
            stage_of.update(dict.fromkeys(item.outputs, item.stage))


def _embedded(flat: FlatFunction, parameters: Sequence[int]) -> set[int]:
    """The values without a stage that are computed from parameters and data, such as embeddings."""
    constant, mixed = set(parameters), set[int]()
    for item in flat.items:
        if item.reads and constant.issuperset(item.reads):
            constant.update(item.outputs)
        elif item.stage is None and any(v in constant or v in mixed for v in item.reads):
            mixed.update(item.outputs)
    return mixed


def _move_division(flat: FlatFunction, stage: int, movable: set[int], embedded: set[int]) -> None:
    """Moves the last items of a stage, which read none of its parameters, if fewer bytes cross then.

    They go to the first stage that reads this one: the end of a tower is not moved to another tower.
    `embedded` values, which have no stage, cross if they are read on both sides.
    """
    staged = [item for item in flat.items if item.stage is not None]
    own = [item for item in staged if item.stage == stage]
    first = len(own)
    while first and id(own[first - 1]) in movable:
        first -= 1
    readers, results = flat.readers(), set(numbers(flat.outputs))
    after = {r.stage for item in own for v in item.outputs for r in readers[v] if (r.stage or 0) > stage}
    following = min((s for s in after if s is not None), default=stage + 1)
    later = [item for item in staged if item.stage == following and id(item) not in movable]
    if not later or any(item in own[first:] for item in staged[staged.index(later[0]) :]):
        return

    def crossing(begin: int) -> int:
        """Bytes that later stages read of this and earlier ones, if items from `begin` are of that stage."""
        moved = set(map(id, own[begin:]))
        before = [item for item in until if id(item) not in moved]
        made = {v for item in before for v in item.outputs}
        read = embedded.intersection(v for item in before for v in item.reads)
        return sum(
            size(flat.avals[v])
            for v in made | read
            if v in results or any(id(r) in moved or (r.stage or 0) > stage for r in readers[v])
        )

    until = [item for item in staged if (item.stage or 0) <= stage]
    best = min(range(first, len(own) + 1), key=lambda begin: (crossing(begin), begin))
    for item in own[best:]:
        item.stage = following


def _compute_where_read(flat: FlatFunction, movable: Sequence[Item]) -> None:
    """Moves items that one later stage reads there, if it is sent what they read anyway.

    Such as the mask or the transpose of an encoder's values, that each decoder layer computes for itself.
    """
    readers = flat.readers()
    for item in reversed(movable):
        after = {reader.stage for v in item.outputs for reader in readers[v]}
        stage = next(iter(after)) if len(after) == 1 else None
        if stage is None or item.stage is None or stage <= item.stage:
            continue
        if all(any(r.stage == stage and r is not item for r in readers[v]) for v in item.reads):
            item.stage = stage


def follow_readers(flat: FlatFunction, besides: Container[Item] = ()) -> None:
    """Items without a stage that only one stage reads have this stage, besides some."""
    results = set(numbers(flat.outputs))
    readers = flat.readers()
    for item in reversed(flat.items):
        free = item.stage is None and not item.stays_out and item not in besides
        if free and results.isdisjoint(item.outputs):
            stages = {reader.stage for v in item.outputs for reader in readers[v]}
            if len(stages) == 1:
                item.stage = stages.pop()


def check_order(flat: FlatFunction, stage_of: Mapping[int, int], paths: Mapping[int, str]) -> None:
    """Checks that the parameters of every stage are read in their stage.

    Args:
        flat: with the stages of all items.
        stage_of: the stages of parameters.
        paths: pytree path of each.

    Raises:
        ConfigError: parameters are read in later stages only: layers run in another order.
    """
    readers = flat.readers()
    problems = []
    for parameter, stage in stage_of.items():
        final = _final_readers(parameter, readers)
        stages = sorted({item.stage for item in final if item.stage is not None})
        if stages and stage not in stages:
            item = next(item for item in final if item.stage == stages[0])
            problems.append(
                f"{paths[parameter]} is a parameter of stage {stage}, but {item.where} reads it in stage "
                f"{stages[0]}{item.why_whole}"
            )
    if problems:
        problems = problems[:_REPORTED]
        raise collect(
            ConfigError,
            [f"{p}\n  layers run in another order than their paths say" for p in problems],
            "the layers run in another order than their paths say:",
        )


_REPORTED = 4
"""How many parameters, or scopes, in the wrong stage an error shows."""


def _final_readers(
    value: int, readers: Mapping[int, Sequence[Item]], besides: Container[Item] = ()
) -> list[Item]:
    """The items, besides some, with a stage that read a value, or what others compute from it."""
    final, todo, seen = [], [value], {value}
    while todo:
        for item in readers[todo.pop()]:
            if item in besides:
                continue
            if item.stage is not None:
                final.append(item)
                continue
            todo += [v for v in item.outputs if v not in seen]
            seen.update(item.outputs)
    return final


def size(aval: object) -> int:
    """Bytes of a value."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return int(math.prod(getattr(aval, "shape", ())) * itemsize)


def stages_by_paths(selector: Selector, paths: Sequence[str], *, beside: bool = False) -> list[int | None]:
    """The stage of each parameter; None for those that no pattern matches.

    Args:
        selector: has the patterns.
        paths: of the parameters.
        beside: whether they are of a frozen model beside the loss's, which may have any number of layers.

    Raises:
        ConfigError: a pattern matches nothing, or the number of layers does not fit the stages.
    """
    if not beside:
        selector.check_matches(paths)
    stages = _stages_of_texts(selector, paths, selector.stages_beside if beside else selector.stages_of)
    return [selector.pinned(path) if stage is None else stage for path, stage in zip(paths, stages)]


def stages_by_scopes(selector: Selector, flat: FlatFunction) -> dict[Item, int]:
    """The stages of the items whose scopes a pattern matches.

    Raises:
        ConfigError: a pattern matches nothing, or the number of layers does not fit the stages.
    """
    scopes = [item.scope for item in flat.items]
    selector.check_matches([scope for scope in dict.fromkeys(scopes) if scope])
    stages = _stages_of_texts(selector, scopes, selector.stages_of)
    return {item: stage for item, stage in zip(flat.items, stages) if stage is not None}


def check_scopes(wanted: Mapping[Item, int]) -> None:
    """Checks that items are in the stages of their scopes.

    Raises:
        ConfigError: some are in later ones, whose values they read: layers run in another order.
    """
    problems = {
        item.scope: f"{item.scope} is of stage {stage}, but {item.where} in it reads values of stage "
        f"{item.stage}"
        for item, stage in wanted.items()
        if item.stage != stage
    }
    if problems:
        raise collect(
            ConfigError,
            list(problems.values())[:_REPORTED],
            "the layers run in another order than their scopes say:",
        )


def _stages_of_texts(
    selector: Selector, texts: Sequence[str], stages_of: Callable[[int], list[int]]
) -> list[int | None]:
    """The stage of the layer that each text is of."""
    layers = [_layer(selector.patterns, text) for text in texts]
    order = sorted({layer for layer in layers if layer is not None})
    stage_of = dict(zip(order, stages_of(len(order)), strict=True))
    return [None if layer is None else stage_of[layer] for layer in layers]


def _layer(patterns: Sequence[str], text: str) -> Any:
    """The layer of a parameter or scope: the pattern that matches it, and the values of its groups."""
    for position, pattern in enumerate(patterns):
        match = re.search(pattern, text)
        if match:
            return position, tuple(map(_in_order, match.groups("")))
    return None


def _in_order(text: str) -> tuple[Any, ...]:
    """A text so that the numbers in it are compared as numbers."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text))
