"""Predictions from measured fragments: each candidate is compiled, and its fragments are timed alone.

Meshes that share a machine make each other slower, and the host takes time for each instruction.  Both are
found from timelines, and are the same for all candidates, the medians of them: by how much fragments take
longer than alone, and by how much the step then still is longer than simulated, for each instruction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mpmd.api.jit import jit
from mpmd.api.planning.candidate import PlanCandidate
from mpmd.api.planning.result import config_for
from mpmd.api.refine import measured_fragments, zeros
from mpmd.api.stages import Compiled
from mpmd.runtime.costs import ProgramCosts
from mpmd.scheduling.timeline import Timeline

_TIMELINES = 7


@dataclasses.dataclass(frozen=True)
class MachineFactors:
    """What fragments measured alone do not show.

    Attributes:
        contention: seconds of fragments that run while other meshes do, in units of those alone.
        instruction_s: seconds of the host for an instruction of a stream.
    """

    contention: float
    instruction_s: float

    def predict(self, compiled: Compiled, costs: ProgramCosts) -> tuple[Timeline, float]:
        """The simulated timeline of a step, and the seconds of the step.

        Args:
            compiled: the step.
            costs: of its fragments alone.
        """
        slower = {name: seconds * self.contention for name, seconds in costs.fragments.items()}
        timeline = compiled.schedule(ProgramCosts(slower, costs.transfers))
        return timeline, timeline.makespan_s + _instructions(compiled) * self.instruction_s


def factors_of(compiled: Compiled, costs: ProgramCosts) -> MachineFactors:
    """The factors, from timelines of a step on zeros.

    Args:
        compiled: the step.
        costs: of its fragments alone.
    """
    timelines = []
    for _ in range(_TIMELINES):
        positional, keywords = zeros(compiled.lowered.traced.arguments)
        timelines.append(compiled.timeline(*positional, **keywords)[1])
    ratios = []
    for timeline in timelines:
        spans = [span for mesh in timeline.meshes for span in timeline.compute(mesh)]
        alone = sum(costs.fragments.get(span.name, span.seconds) for span in spans)
        ratios.append(sum(span.seconds for span in spans) / alone if alone else 1.0)
    together = MachineFactors(max(1.0, statistics.median(ratios)), 0.0)
    rest = statistics.median(t.makespan_s for t in timelines) - together.predict(compiled, costs)[1]
    return dataclasses.replace(together, instruction_s=max(0.0, rest) / _instructions(compiled))


def _instructions(compiled: Compiled) -> int:
    """Instructions of the longest stream."""
    return max(len(stream.instructions) for stream in compiled.program.streams)


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
    with contextlib.ExitStack() as stack:
        steps: list[tuple[PlanCandidate, Compiled, ProgramCosts]] = []
        factors: list[MachineFactors] = []
        for number, candidate in enumerate(ranked[:count], 1):
            show(f"measuring {number} of {min(count, len(ranked))}")
            choice = candidate.choice
            step = jit(bind(choice.microbatches), config_for(choice, options))
            compiled = step.lower(*args, **kwargs).compile()
            stack.callback(compiled.close)
            costs = measured_fragments(compiled)
            steps.append((candidate, compiled, costs))
            factors.append(factors_of(compiled, costs))
        machine = MachineFactors(
            statistics.median([of.contention for of in factors] or [1.0]),
            statistics.median([of.instruction_s for of in factors] or [0.0]),
        )
        measured = [
            _measured(candidate, compiled, *machine.predict(compiled, costs))
            for candidate, compiled, costs in steps
        ]
    ratios = [found.step_s / estimate.step_s for found, estimate in zip(measured, ranked)]
    scale = statistics.median(ratios) if ratios else 1.0
    others = [dataclasses.replace(c, step_s=c.step_s * scale) for c in ranked[count:]]
    return [*measured, *others, *(c for c in candidates if c.refused)]


def _measured(
    candidate: PlanCandidate, compiled: Compiled, timeline: Timeline, step_s: float
) -> PlanCandidate:
    peaks = compiled.memory_analysis()
    names = [f"m{mesh}" for mesh in range(candidate.choice.meshes)]
    busy = sum(timeline.busy_s(name) for name in names)
    return dataclasses.replace(
        candidate,
        step_s=step_s,
        bubble=1 - busy / (step_s * len(names)),
        peak_bytes=tuple(peaks[name].peak_bytes // candidate.choice.devices for name in names),
        held=tuple(peaks[name].by_category for name in names),
        sent_bytes=sum(span.nbytes for span in timeline.transfers),
        timeline=timeline,
        is_measured=True,
    )
