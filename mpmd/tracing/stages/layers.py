"""The layer, and so the stage, of each parameter of a model with separate layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mpmd.tracing.stages.selectors import Selector


def stages_by_paths(selector: Selector, paths: Sequence[str]) -> list[int | None]:
    """The stage of each parameter; None for those that no pattern matches.

    Raises:
        ConfigError: a pattern matches nothing, or the number of layers does not fit the stages.
    """
    selector.check_matches(paths)
    layers = [_layer(selector.patterns, path) for path in paths]
    order = sorted({layer for layer in layers if layer is not None})
    stage_of = dict(zip(order, selector.stages_of(len(order)), strict=True))
    return [selector.pinned(path) if layer is None else stage_of[layer] for path, layer in zip(paths, layers)]


def _layer(patterns: Sequence[str], path: str) -> Any:
    """The layer of a parameter: the pattern that matches it, and the values of its groups."""
    for position, pattern in enumerate(patterns):
        found = re.search(pattern, path)
        if found:
            return position, tuple(map(_in_order, found.groups("")))
    return None


def _in_order(text: str) -> tuple[Any, ...]:
    """A text so that the numbers in it are compared as numbers."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text))
