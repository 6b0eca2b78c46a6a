"""Every way to run a step on some devices, predicted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from mpmd.api.planning.candidate import PlanCandidate, PlanChoice
from mpmd.api.planning.costs import StepSizes, division_costs, link_of, update_seconds
from mpmd.errors import ScheduleError
from mpmd.scheduling.catalogue import get_schedule
from mpmd.scheduling.simulate import simulate
from mpmd.scheduling.table import ScheduleTable, visits
from mpmd.scheduling.task_costs import Costs
from mpmd.tracing.stages.select.automatic import DivisionChoice
from mpmd.tracing.stages.select.division import DeviceRates, Meshes, Segments, choose
from mpmd.tracing.stages.select.stage_report import bytes_text

Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class PlanSpace:
    """What a search chooses from.

    Attributes:
        losses: the chain of the loss of one microbatch, by the number of microbatches.
        divisions: (number of meshes, axes of each), with the sizes of the step there, or why not.
        stages_per_mesh: how many.
        schedules: their names.
        rematerialise: whether stages compute their forwards again.
        memory: bytes of a device; None for no limit.
        rates: of a device.
    """

    losses: Mapping[int, DivisionChoice]
    divisions: Sequence[tuple[int, Axes, StepSizes | str]]
    stages_per_mesh: Sequence[int]
    schedules: Sequence[str]
    rematerialise: Sequence[bool]
    memory: int | None
    rates: DeviceRates

    def __len__(self) -> int:
        return (
            len(self.losses) * len(self.divisions) * len(self.stages_per_mesh) * len(self.schedules)
            * len(self.rematerialise)
        )  # fmt: skip


class PlanSearch:
    """Predicts the choices of a space, one after the other."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self._tables: dict[tuple[str, int, int, int], ScheduleTable | str] = {}
        self._starts: dict[tuple[int, int, int], tuple[int, ...] | None] = {}

    def candidates(self) -> Iterator[PlanCandidate | None]:
        """Each candidate; None for a combination that says the same as another."""
        space = self.space
        for (count, axes, sizes), per_mesh, microbatches in itertools.product(
            space.divisions, space.stages_per_mesh, space.losses
        ):
            for schedule, rematerialise in itertools.product(space.schedules, space.rematerialise):
                choice = PlanChoice(
                    microbatches, axes, tuple(range(count)) * per_mesh, schedule, rematerialise, ()
                )
                yield self._predicted(choice, count, per_mesh, sizes)

    def _predicted(
        self, choice: PlanChoice, count: int, per_mesh: int, sizes: StepSizes | str
    ) -> PlanCandidate | None:
        if isinstance(sizes, str):
            return PlanCandidate(choice, float("inf"), refused=sizes)
        stages = count * per_mesh
        if count == 1 and (per_mesh > 1 or choice.schedule != self.space.schedules[0]):
            return None
        starts = self._starts_of(choice.microbatches, stages, choice.devices)
        if starts is None:
            places = len(self.space.losses[choice.microbatches].units.chain)
            refused = f"{stages} stages, but the loss has {places} places to divide"
            return PlanCandidate(choice, float("inf"), refused=refused)
        table = self._table(choice.schedule, stages, count, choice.microbatches)
        if isinstance(table, str):
            return PlanCandidate(choice, float("inf"), refused=table) if per_mesh == 1 else None
        several = len(visits(table.stage_to_mesh)) > count
        if several != (per_mesh > 1) and count > 1:
            return None  # neighbouring stages of a mesh are one stage
        choice = dataclasses.replace(choice, starts=starts, placement=table.stage_to_mesh)
        units = self.space.losses[choice.microbatches].units
        costs = division_costs(
            units, starts, choice.devices, self.space.rates, sizes, rematerialise=choice.rematerialise
        )
        return predict(choice, table, costs, self.space, sizes)

    def _starts_of(self, microbatches: int, stages: int, devices: int) -> tuple[int, ...] | None:
        key = microbatches, stages, devices
        if key not in self._starts:
            chain, rates = self.space.losses[microbatches].units.chain, self.space.rates
            found = None
            if len(chain) >= stages:
                meshes = Meshes((devices,) * stages, 2 / (rates.link_bandwidth * devices))
                found, _ = choose(Segments(chain, meshes), stages)
            self._starts[key] = None if found is None else found.starts
        return self._starts[key]

    def _table(self, schedule: str, stages: int, meshes: int, microbatches: int) -> ScheduleTable | str:
        key = schedule, stages, meshes, microbatches
        if key not in self._tables:
            try:
                self._tables[key] = get_schedule(schedule).table(stages, meshes, microbatches)
            except ScheduleError as error:
                self._tables[key] = str(error).splitlines()[0]
        return self._tables[key]


def predict(
    choice: PlanChoice, table: ScheduleTable, costs: Costs, space: PlanSpace, sizes: StepSizes
) -> PlanCandidate:
    """The prediction of one choice, refused if it does not fit the memory."""
    names = [f"m{mesh}" for mesh in range(choice.meshes)]
    link = link_of(choice.devices, space.rates)
    timeline = simulate(table, costs, link, mesh_names=names)
    update = update_seconds(costs, choice.placement, space.rates, choice.devices, sizes)
    ends = [max((s.end_s for s in timeline.compute(name)), default=0.0) for name in names]
    step_s = max(end + seconds for end, seconds in zip(ends, update, strict=True))
    busy = sum(timeline.busy_s(name) for name in names) + sum(update)
    peaks = tuple(memory.peak_bytes // choice.devices for memory in timeline.memory)
    held = tuple(memory.at_peak for memory in timeline.memory)
    sent = sum(span.nbytes for span in timeline.transfers)
    bubble = 1 - busy / (step_s * len(names)) if step_s else 0.0
    found = PlanCandidate(choice, step_s, max(0.0, bubble), peaks, held, sent, timeline)
    return dataclasses.replace(found, refused=too_large(found, space.memory))


def too_large(candidate: PlanCandidate, limit: int | None) -> str:
    """Which mesh needs more than a limit of each device, and mostly for what; "" if none does."""
    most = max(candidate.peak_bytes)
    if limit is None or most <= limit:
        return ""
    mesh = candidate.peak_bytes.index(most)
    held = candidate.held[mesh]
    kind = max(held, key=lambda name: held[name])
    share = bytes_text(held[kind] / candidate.choice.devices)
    return f"{bytes_text(most)} on each device of m{mesh}, mostly {kind} ({share})"
