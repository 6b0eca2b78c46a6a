"""What to change of a step that does not fit its devices, so that it would."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from mpmd.brief import bytes_text, seconds_text
from mpmd.config.config import Config, with_stages
from mpmd.errors import MpmdError
from mpmd.options import current_options
from mpmd.planning.step_forecast import StepForecast, forecast
from mpmd.tracing.stages.select.automatic import AutomaticSelector

Change = tuple[str, Callable[[Config], Config]]
"""What to write, and its effect on a configuration."""

_HOLD_MORE = ("gpipe", "eager_1f1b", "zb_h1", "zb_h2")
"""Schedules of one stage on each mesh that hold more than 1F1B does."""

_EXCHANGES = {"gather_weights": "per_use", "reduce_gradients": "per_microbatch"}
"""Options of which each device keeps more in memory otherwise, and gets more messages with."""


def nearest_fit(refused: StepForecast) -> str:
    """The fastest of the fewest changes with which a step fits, as a line of its page.

    One change is tried at a time, then two together, and so on.  Each is partitioned and forecast as the step
    itself is.

    Args:
        refused: a forecast that does not fit, of a step traced in a dry run.
    """
    changes = list(_changes(refused))
    least: tuple[int, str] | None = None
    for count in range(1, len(changes) + 1):
        tried = [(chosen, _changed(refused, chosen)) for chosen in itertools.combinations(changes, count)]
        fits = [(f.step_s, what, f) for what, f in _named(tried) if not f.too_large]
        if fits:
            _, what, best = min(fits, key=lambda found: found[:2])
            return (
                f"it fits with {what}: {bytes_text(_most(best))} at most, {seconds_text(best.step_s)} a step "
                f"instead of {seconds_text(refused.step_s)}"
            )
        peaks = [(_most(f), what) for what, f in _named(tried)]
        least = min([*peaks, *([least] if least is not None else [])], default=None)
    state = max(m.by_category.get("argument", 0) // _size(refused, m.mesh) for m in refused.memory.values())
    tried_text = f"the least is {bytes_text(least[0])}, with {least[1]}; " if least is not None else ""
    return (
        f"nothing that was tried fits: {tried_text}parameters, optimizer and batch alone take "
        f"{bytes_text(state)}\n  use more meshes, shard the state over more devices, or take smaller "
        "microbatches"
    )


def _changes(refused: StepForecast) -> Iterator[Change]:
    config = refused.lowered.config
    stages = config.stages
    if isinstance(stages, AutomaticSelector) and not stages.rematerialise:
        checkpointed = dataclasses.replace(stages, rematerialise=True)
        yield "stages=mpmd.by_cost(rematerialise=True)", lambda c: with_stages(c, checkpointed)
    if config.pipeline_schedule.name in _HOLD_MORE:
        yield 'schedule="1f1b"', lambda c: dataclasses.replace(c, schedule="1f1b")
    options = config.options if config.options is not None else current_options()
    if any(mesh.size > 1 for mesh in config.topology.values()):
        for name, value in _EXCHANGES.items():
            if getattr(options, name) != value:
                yield f'{name}="{value}"', _with_option(name, value)


def _with_option(name: str, value: Any) -> Callable[[Config], Config]:
    def changed(config: Config) -> Config:
        options: Any = config.options if config.options is not None else current_options()
        return dataclasses.replace(config, options=dataclasses.replace(options, **{name: value}))

    return changed


def _changed(refused: StepForecast, changes: tuple[Change, ...]) -> StepForecast | None:
    """The forecast with changes; None if the step cannot be partitioned with them."""
    traced = refused.lowered.traced
    assert traced.again is not None
    config = traced.config
    for _, change in changes:
        config = change(config)
    try:
        return forecast(traced.again(config).lower(), refused.world)
    except MpmdError:
        return None


def _named(
    tried: list[tuple[tuple[Change, ...], StepForecast | None]],
) -> Iterator[tuple[str, StepForecast]]:
    for changes, found in tried:
        if found is not None:
            yield " and ".join(what for what, _ in changes), found


def _most(forecast: StepForecast) -> int:
    return max(map(forecast.peak_of, forecast.memory))


def _size(forecast: StepForecast, mesh: str) -> int:
    return int(forecast.lowered.config.topology[mesh].size)
