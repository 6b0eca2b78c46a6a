"""The layer, and so the stage, of each parameter or each item of a model with separate layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mpmd.errors import ConfigError, collect
from mpmd.tracing.stages.items import FlatFunction, Item
from mpmd.tracing.stages.selectors import Selector


def stages_by_paths(selector: Selector, paths: Sequence[str]) -> list[int | None]:
    """The stage of each parameter; None for those that no pattern matches.

    Raises:
        ConfigError: a pattern matches nothing, or the number of layers does not fit the stages.
    """
    selector.check_matches(paths)
    found = _stages_of_texts(selector, paths)
    return [selector.pinned(path) if stage is None else stage for path, stage in zip(paths, found)]


def stages_by_scopes(selector: Selector, flat: FlatFunction) -> dict[Item, int]:
    """The stages of the items whose scopes a pattern matches.

    Raises:
        ConfigError: a pattern matches nothing, or the number of layers does not fit the stages.
    """
    scopes = [item.scope for item in flat.items]
    selector.check_matches([scope for scope in dict.fromkeys(scopes) if scope])
    found = _stages_of_texts(selector, scopes)
    return {item: stage for item, stage in zip(flat.items, found) if stage is not None}


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


_REPORTED = 4
"""How many scopes with items in the wrong stage an error shows."""


def _stages_of_texts(selector: Selector, texts: Sequence[str]) -> list[int | None]:
    """The stage of the layer that each text is of."""
    layers = [_layer(selector.patterns, text) for text in texts]
    order = sorted({layer for layer in layers if layer is not None})
    stage_of = dict(zip(order, selector.stages_of(len(order)), strict=True))
    return [None if layer is None else stage_of[layer] for layer in layers]


def _layer(patterns: Sequence[str], text: str) -> Any:
    """The layer of a parameter or scope: the pattern that matches it, and the values of its groups."""
    for position, pattern in enumerate(patterns):
        found = re.search(pattern, text)
        if found:
            return position, tuple(map(_in_order, found.groups("")))
    return None


def _in_order(text: str) -> tuple[Any, ...]:
    """A text so that the numbers in it are compared as numbers."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text))
