"""Predictions from measured fragments: candidates are compiled, and their fragments are timed alone.

A machine is not equally fast from one second to the next, so all candidates are measured in turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpmd.api.jit import jit
from mpmd.api.planning.candidate import PlanCandidate
from mpmd.api.planning.machine import HostFactors, StepSamples
from mpmd.api.planning.partitioned import by_program
from mpmd.api.planning.result import config_for
from mpmd.api.refine import zeros
from mpmd.api.stages import Compiled
from mpmd.runtime.costs import ProgramCosts
from mpmd.scheduling.timeline import Timeline

_ROUNDS = 7


class CandidateSteps:
    """Compiled candidates with their measurements; a context, which closes them.

    Attributes:
        candidates: with estimates.
        compiled: the step of each.
    """

    def __init__(
        self,
        candidates: Sequence[PlanCandidate],
        bind: Callable[[int], Any],
        options: dict[str, Any],
        args: Any,
        kwargs: Any,
        show: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Compiles the candidates.

        Args:
            candidates: with estimates.
            bind: the step with a number of microbatches.
            options: of `make_config`.
            args: positional arguments of the step; zeros are used if some have only shapes.
            kwargs: keyword arguments.
            show: reports progress.
        """
        self.candidates, self._show = candidates, show
        self.compiled: list[Compiled] = []
        with contextlib.ExitStack() as opened:
            for number, candidate in enumerate(candidates, 1):
                show(f"compiling {number} of {len(candidates)}")
                choice = candidate.choice
                step = jit(bind(choice.microbatches), config_for(choice, options))
                self.compiled.append(step.lower(*args, **kwargs).compile())
                opened.callback(self.compiled[-1].close)
            self._opened = opened.pop_all()
        self._inputs = [_inputs(compiled, args, kwargs) for compiled in self.compiled]
        self._costs: list[list[ProgramCosts]] = [[] for _ in candidates]
        self._timelines: list[list[Timeline]] = [[] for _ in candidates]
        self._seconds: list[list[float]] = [[] for _ in candidates]

    def measure(self) -> None:
        """Measures all of them once: the fragments alone, a timeline, and a call without a recorder."""
        for k, compiled in enumerate(self.compiled):
            self._show(f"measuring {k + 1} of {len(self.compiled)}")
            positional, keywords = self._inputs[k]
            self._costs[k].append(compiled.costs(*positional, **keywords)[1])
            self._timelines[k].append(compiled.timeline(*positional, **keywords)[1])
            start = time.perf_counter()
            jax.block_until_ready(compiled(*positional, **keywords))
            self._seconds[k].append(time.perf_counter() - start)

    def predicted(self) -> list[PlanCandidate]:
        steps = [
            StepSamples(_median_costs(costs), timelines, seconds)
            for costs, timelines, seconds in zip(self._costs, self._timelines, self._seconds, strict=True)
        ]
        host = HostFactors.of(steps)
        return [
            _measured(candidate, compiled, *host.predict(compiled, step))
            for candidate, compiled, step in zip(self.candidates, self.compiled, steps, strict=True)
        ]

    def __enter__(self) -> CandidateSteps:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()


def _inputs(compiled: Compiled, args: Any, kwargs: Any) -> Any:
    """Positional and keyword arguments, where the step needs them."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))):
        args, kwargs = zeros(compiled.lowered.traced.arguments)
    return jax.tree.map(_placed, (tuple(args), kwargs), compiled.input_shardings)


def _placed(leaf: Any, sharding: Any) -> Any:
    """An array on its mesh; the parts of a stack are placed by the step."""
    return jax.device_put(leaf, sharding) if isinstance(sharding, jax.sharding.Sharding) else leaf


def _median_costs(runs: Sequence[ProgramCosts]) -> ProgramCosts:
    """The median seconds of each fragment and kind of message."""
    return ProgramCosts(
        {name: statistics.median(run.fragments[name] for run in runs) for name in runs[0].fragments},
        {kinds: statistics.median(run.transfers[kinds] for run in runs) for kinds in runs[0].transfers},
        statistics.median(run.call_s for run in runs),
    )


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

    The estimates of the others are scaled by the median ratio of prediction to estimate.

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
    if not ranked:
        return list(candidates)
    with CandidateSteps(ranked[:count], bind, options, args, kwargs, show) as steps:
        for _ in range(_ROUNDS):
            steps.measure()
        measured = steps.predicted()
    scale = statistics.median(
        found.step_s / estimate.step_s for found, estimate in zip(measured, ranked, strict=False)
    )
    others = [dataclasses.replace(c, step_s=c.step_s * scale) for c in ranked[count:]]
    return [*measured, *others, *(c for c in candidates if c.refused)]


def _measured(
    candidate: PlanCandidate, compiled: Compiled, timeline: Timeline, step_s: float
) -> PlanCandidate:
    made = by_program(candidate, timeline, step_s, compiled.memory_analysis())
    return dataclasses.replace(made, is_measured=True)
