"""The difference between fragments that run alone and fragments in a step.

In a step a fragment takes longer while other meshes use the same cores, caches and memory.  The host takes
time to start it after the last value that it needs is there.  A message takes longer to arrive while all
cores are busy, and a call takes time before the first fragment and after the last.  All of these vary from
run to run, and a run waits for the latest of its values, so that a simulation with medians is too short: here
every run and message is drawn from the observed ones, several times, and the median step counts.

Source: Monte Carlo analysis of activity networks (van Slyke, 1963).
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence

from mpmd.api.stages import Compiled
from mpmd.api.timeline import WAITS_FOR_HOST
from mpmd.runtime.costs import ProgramCosts
from mpmd.runtime.graph import BufferType
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

        It depends on what the fragments of the other meshes do meanwhile.
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
        timelines = sorted((compiled.schedule(drawn) for _ in range(_DRAWS)), key=lambda t: t.makespan_s)
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
