"""Models that a loss closes over, and that are computed beside its own: a reference, a teacher."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

from mpmd.tracing.stages.items import FlatFunction
from mpmd.tracing.stages.select.selectors import Selector


def models_apart(flat: FlatFunction, paths: Mapping[int, str], selector: Selector) -> list[dict[int, str]]:
    """The models whose layers are divided by themselves, with the paths of their parameters.

    A model is what paths have before a pattern, such as `teacher/` of `teacher/layers/3/w`.  One whose
    parameters meet values of the loss's own, as frozen weights meet adapters, is not a model apart.

    Args:
        flat: its items have no stages.
        paths: the path of each parameter, and of each frozen one that it closes over.
        selector: has the patterns.
    """
    model_of = {v: _model(selector, path) for v, path in paths.items() if v in flat.constants}
    own = {v for v in paths if v not in model_of}
    weights = {v: {model} for v, model in model_of.items()}
    joined = set[str | None]((None,))
    for item in flat.items:
        if not own.isdisjoint(item.reads):
            own.update(item.outputs)
            joined.update(*(weights.get(v, ()) for v in item.reads))
        elif item.reads and all(v in weights for v in item.reads):
            models = set().union(*(weights[v] for v in item.reads))
            weights.update(dict.fromkeys(item.outputs, models))
    apart: dict[str | None, dict[int, str]] = collections.defaultdict(dict)
    for v, model in model_of.items():
        if model not in joined:
            apart[model][v] = paths[v]
    return list(apart.values())


def _model(selector: Selector, path: str) -> str | None:
    """The path before a layer; None for a parameter of no layer."""
    matches = (re.search(pattern, path) for pattern in selector.patterns)
    return next((path[: match.start()] for match in matches if match), None)
