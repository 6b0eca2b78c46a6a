"""Predictions from measured fragments: each candidate is compiled, and its fragments are timed alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mpmd.api.jit import jit
from mpmd.api.planning.candidate import PlanCandidate
from mpmd.api.planning.result import config_for
from mpmd.api.refine import measured_fragments


def measured_candidates(
    candidates: Sequence[PlanCandidate],
    count: int,
    bind: Callable[[int], Any],
    options: dict[str, Any],
    args: Any,
    kwargs: Any,
    show: Callable[[str], None],
) -> list[PlanCandidate]:
    """The candidates, of which the best are predicted from measured fragments.

    Args:
        candidates: with estimates.
        count: how many to measure.
        bind: the step with a number of microbatches.
        options: of `make_config`.
        args: positional arguments of the step, for their shapes.
        kwargs: keyword arguments.
        show: reports progress.
    """
    ranked = sorted((c for c in candidates if not c.refused), key=lambda c: c.order)
    measured = []
    for number, candidate in enumerate(ranked[:count], 1):
        show(f"measuring {number} of {min(count, len(ranked))}")
        measured.append(_measured(candidate, bind, options, args, kwargs))
    return [*measured, *ranked[count:], *(c for c in candidates if c.refused)]


def _measured(
    candidate: PlanCandidate, bind: Callable[[int], Any], options: dict[str, Any], args: Any, kwargs: Any
) -> PlanCandidate:
    choice = candidate.choice
    step = jit(bind(choice.microbatches), config_for(choice, options))
    compiled = step.lower(*args, **kwargs).compile()
    try:
        timeline = compiled.schedule(measured_fragments(compiled))
        peaks = compiled.memory_analysis()
    finally:
        compiled.close()
    names = [f"m{mesh}" for mesh in range(choice.meshes)]
    return dataclasses.replace(
        candidate,
        step_s=timeline.makespan_s,
        bubble=timeline.bubble_fraction(),
        peak_bytes=tuple(peaks[name].peak_bytes // choice.devices for name in names),
        held=tuple(peaks[name].by_category for name in names),
        sent_bytes=sum(span.nbytes for span in timeline.transfers),
        timeline=timeline,
        is_measured=True,
    )
