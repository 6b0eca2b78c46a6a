"""Predictions from measured fragments: candidates are compiled, and their fragments are timed alone.

A machine is not equally fast from one second to the next, so all candidates are measured in turns.

The difference between fragments that run alone and fragments in a step.

In a step a fragment takes longer while other meshes use the same cores, caches and memory.  The host takes
time to start it after the last value that it needs is there.  A message takes longer to arrive while all
cores are busy, and a call takes time before the first fragment and after the last.  All of these vary from
run to run, and a run waits for the latest of its values, so that a simulation with medians is too short: here
every run and message is drawn from the observed ones, several times, and the median step counts.

Source: Monte Carlo analysis of activity networks (van Slyke, 1963).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpmd.api.aot import Compiled
from mpmd.api.jit import jit
from mpmd.api.refine import zeros
from mpmd.estimate.program_timeline import WAITS_FOR_HOST
from mpmd.planning.candidates import PlanCandidate
from mpmd.planning.partitioned import by_program
from mpmd.planning.result import config_for
from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.program.graph import BufferType
from mpmd.scheduling.timeline import IDLE, Timeline

_DRAWS = 31


@dataclasses.dataclass(frozen=True)
class StepSamples:
    """Runs of one step.

    Attributes:
        costs: of its fragments and messages alone.
        timelines: of whole steps.
        seconds: of calls without a recorder, one next to each timeline.
    """

    costs: ProgramCosts
    timelines: Sequence[Timeline]
    seconds: Sequence[float]

    def contention(self) -> list[tuple[float, float]]:
        """For each run its seconds alone, and its seconds in a step in units of these.

        It depends on the fragments that other meshes run at the same time.
        """
        spans = [
            span for timeline in self.timelines for mesh in timeline.meshes for span in timeline.compute(mesh)
        ]
        alone = [self.costs.run_s(span.name) for span in spans]
        return [
            (before, span.seconds / before) for before, span in zip(alone, spans, strict=True) if before > 0
        ]


@dataclasses.dataclass(frozen=True)
class HostFactors:
    """Overheads of the host, the same for all steps on the machine.

    Attributes:
        starts: seconds from when each run could begin until it did.
        arrivals: seconds of each wait for a message that was under way.
        call_s: seconds of a call before its first fragment and after its last.
    """

    starts: tuple[float, ...]
    arrivals: tuple[float, ...]
    call_s: float

    @staticmethod
    def of(steps: Sequence[StepSamples]) -> HostFactors:
        starts: list[float] = []
        arrivals: list[float] = []
        calls: list[float] = []
        for step in steps:
            for seconds, timeline in zip(step.seconds, step.timelines, strict=True):
                runs = sum(len(timeline.compute(mesh)) for mesh in timeline.meshes)
                idle = [span for span in timeline.spans if span.kind == IDLE]
                delayed = [span.seconds for span in idle if span.note.endswith(WAITS_FOR_HOST)]
                starts += [*delayed, *[0.0] * (runs - len(delayed))]
                arrivals += [span.seconds for span in idle if span.peer]
                calls.append(seconds - timeline.makespan_s)
        return HostFactors(tuple(starts), tuple(arrivals), max(0.0, statistics.median(calls)))

    def predict(self, compiled: Compiled, step: StepSamples) -> tuple[Timeline, float]:
        """The simulated timeline of the median step, and the seconds of the step.

        Args:
            compiled: the step.
            step: its runs.
        """
        drawn = _DrawnCosts.of(step, self)
        timelines = sorted(
            (compiled.measure.schedule(drawn) for _ in range(_DRAWS)), key=lambda t: t.makespan_s
        )
        median = timelines[_DRAWS // 2]
        return median, median.makespan_s + self.call_s


@dataclasses.dataclass(frozen=True)
class _DrawnCosts(ProgramCosts):
    """Costs that differ from run to run, as observed; the same numbers every time.

    Attributes:
        ratios: seconds in a step in units of those alone, of each observed run.
        weights: their probabilities: a run counts by its length, as it does in a step.
        host: observed delays.
        generator: of random numbers.
    """

    ratios: tuple[float, ...] = (1.0,)
    weights: tuple[float, ...] = (1.0,)
    host: HostFactors = HostFactors((), (), 0.0)
    generator: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))

    @staticmethod
    def of(step: StepSamples, host: HostFactors) -> _DrawnCosts:
        """The costs of a step, with the delays of the host."""
        weights, ratios = zip(*step.contention(), strict=True)
        return _DrawnCosts(
            step.costs.fragments, step.costs.transfers, ratios=ratios, weights=weights, host=host
        )

    def run_s(self, fragment: str) -> float:
        """Seconds of a run, and of its start."""
        ratio = self.generator.choices(self.ratios, self.weights)[0]
        start = self.generator.choice(self.host.starts) if self.host.starts else 0.0
        return super().run_s(fragment) * ratio + start

    def message_s(self, kinds: tuple[BufferType, BufferType]) -> float:
        """Seconds of a message: no less than if nothing else runs."""
        alone = super().message_s(kinds)
        return max(alone, self.generator.choice(self.host.arrivals)) if self.host.arrivals else alone


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
            self._costs[k].append(compiled.measure.costs(*positional, **keywords)[1])
            self._timelines[k].append(compiled.measure.timeline(*positional, **keywords)[1])
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
    return jax.tree.map(_placed, (tuple(args), kwargs), compiled.arguments.shardings)


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
        prediction.step_s / estimate.step_s for prediction, estimate in zip(measured, ranked, strict=False)
    )
    others = [dataclasses.replace(c, step_s=c.step_s * scale) for c in ranked[count:]]
    return [*measured, *others, *(c for c in candidates if c.refused)]


def _measured(
    candidate: PlanCandidate, compiled: Compiled, timeline: Timeline, step_s: float
) -> PlanCandidate:
    predicted = by_program(candidate, timeline, step_s, compiled.measure.memory())
    return dataclasses.replace(predicted, is_measured=True)
