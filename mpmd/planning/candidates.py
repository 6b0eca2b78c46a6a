"""Every way to run a step on some devices, predicted.

Costs of the stages of one division, for the simulator.

One way to run a step on some devices, with its prediction.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpmd.brief import MAX_COLUMNS, brief, bytes_text, clipped, counted, few_lines, seconds_text
from mpmd.cost.device import Device
from mpmd.errors import ScheduleError
from mpmd.scheduling.catalogue import get_schedule
from mpmd.scheduling.simulate import simulate
from mpmd.scheduling.table import ScheduleTable, Sources, branching, visits
from mpmd.scheduling.task_costs import Costs, Link, StageCosts
from mpmd.scheduling.timeline import Timeline
from mpmd.tracing.stages.select.automatic import DivisionChoice
from mpmd.tracing.stages.select.chains import UnitChain
from mpmd.tracing.stages.select.division import REMATERIALISED, Chain, Meshes, Segments, choose


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """What a step holds besides the values of its microbatches.

    Attributes:
        state: bytes of parameters and of the optimizer's state, in units of the parameters.
        state_shards: over how many devices of a mesh the parameters are sharded.
        rows: over how many of them the batch is.
        exchanging: parameters, by their numbers, that are split along axes that do not split the batch: each
            product with one has a result, or a gradient, that is a sum over devices.
    """

    state: float = 1.0
    state_shards: int = 1
    rows: int = 1
    exchanging: frozenset[int] = frozenset()


def division_costs(
    units: UnitChain,
    starts: Sequence[int],
    devices: int,
    device: Device,
    sizes: StepSizes,
    *,
    rematerialise: bool,
) -> Costs:
    """Seconds and bytes of the stages between starts; bytes are over all devices of a mesh.

    Args:
        units: the chain of the loss for one microbatch.
        starts: the first units of all stages but the first.
        devices: of each mesh; they share the work evenly.
        device: of one device.
        sizes: of the state.
        rematerialise: whether each stage computes its forward again.
    """
    chain = units.chain
    count = len(starts) + 1
    segments = Segments(chain, Meshes((devices,) * count))
    repeated = list(itertools.accumulate(map(_repeated, chain.seconds, chain.forward), initial=0.0))
    forward_s = [0.0, *itertools.accumulate(chain.forward)]
    kept = [0, *itertools.accumulate(chain.residuals)]
    exchanges = [
        min(unit + 1, len(chain) - 1)
        for k, readers in enumerate(units.parameter_units.values())
        if k in sizes.exchanging
        for unit in readers
    ]
    stages = []
    ends = (0, *starts, len(chain))
    sent = None if branches(units, starts) is None else units.sent(starts)
    for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
        parameters = int(segments.owned(begin, end)[0])
        forward = (forward_s[end] - forward_s[begin]) / devices
        backward = segments.seconds(stage, begin, end) - forward
        again = (repeated[end] - repeated[begin]) / devices if rematerialise else 0.0
        exchanged = [chain.crossing[unit] for unit in exchanges if begin < unit <= end]
        exchange = sum(_all_reduce_s(size / sizes.rows, devices // sizes.rows, device) for size in exchanged)
        values = kept[end] - kept[begin]
        replicas = devices // sizes.state_shards
        stages.append(
            StageCosts(
                forward_s=device.call_seconds + forward + exchange / 2,
                backward_s=device.call_seconds + backward + again + exchange / 2,
                input_gradient_s=device.call_seconds + backward / 2 + again + exchange / 2,
                weight_gradient_s=device.call_seconds + backward / 2,
                output_bytes=_crossing(chain, end) if sent is None else _most(sent, stage, 0),
                input_gradient_bytes=_crossing(chain, begin) if sent is None else _most(sent, stage, 1),
                residual_bytes=chain.crossing[begin] if rematerialise else values,
                workspace_bytes=values if rematerialise else max(chain.residuals[begin:end]),
                parameter_bytes=int(parameters * sizes.state) * replicas,
                gradient_bytes=parameters * replicas,
                batch_bytes=sum(size for size, readers in units.batch if begin <= readers[0] < end)
                * (devices // sizes.rows),
            )
        )
    return Costs(tuple(stages))


def branches(units: UnitChain, starts: Sequence[int]) -> Sources | None:
    """For each stage of a division those that it reads; None for a chain."""
    sources: list[set[int]] = [set() for _ in range(len(starts) + 1)]
    for source, target in units.sent(starts):
        sources[target].add(source)
    return branching(sources)


def _crossing(chain: Chain, place: int) -> int:
    """Bytes that cross before a unit; none do at the ends."""
    return chain.crossing[place] if 0 < place < len(chain) else 0


def _most(sent: Mapping[tuple[int, int], int], stage: int, end: int) -> int:
    """Bytes of the largest message of a stage to its readers (`end` is 0), or to its sources (1)."""
    return max((nbytes for pair, nbytes in sent.items() if pair[end] == stage), default=0)


def _repeated(seconds: float, forward: float) -> float:
    """Seconds of the forward of a unit that no checkpoint computes again yet."""
    return forward if seconds < forward * REMATERIALISED * 0.99 else 0.0


def _all_reduce_s(nbytes: float, devices: int, device: Device) -> float:
    """Seconds of a ring over the devices of a mesh."""
    if devices < 2:
        return 0.0
    return 2 * (devices - 1) * device.message_seconds(nbytes / devices)


def link_of(devices: int, device: Device) -> Link:
    """The link between two meshes of so many devices, each of which sends its share."""
    return Link(latency_s=device.link_seconds, bytes_per_s=device.link_bandwidth * devices)


def update_seconds(
    costs: Costs, placement: Sequence[int], device: Device, devices: int, sizes: StepSizes
) -> list[float]:
    """Seconds of what each mesh does once in a step.

    The optimizer reads and writes its state.  Gradients are reduced over the devices that split the batch;
    where these split the parameters too, each is reduced into its part and gathered, in as many bytes.
    """
    seconds = [0.0] * (max(placement) + 1)
    for stage, mesh in zip(costs.stages, placement, strict=True):
        traffic = 2 * stage.parameter_bytes + stage.gradient_bytes
        seconds[mesh] += traffic / devices / device.bandwidth
        parameters = stage.gradient_bytes * sizes.state_shards / devices
        seconds[mesh] += _all_reduce_s(parameters * sizes.rows / devices, sizes.rows, device)
    return seconds


@dataclasses.dataclass(frozen=True)
class PlanChoice:
    """What a plan chooses.

    Attributes:
        microbatches: of a step.
        axes: of each mesh, and their sizes.
        placement: the number of the mesh of each stage.
        schedule: its name.
        rematerialise: whether each stage computes its forward again in the backward.
        starts: the first units of all stages but the first.
        exchanges: options that differ from one reduction and one gather in a step, and their values.
    """

    microbatches: int
    axes: tuple[tuple[str, int], ...]
    placement: tuple[int, ...]
    schedule: str
    rematerialise: bool
    starts: tuple[int, ...]
    exchanges: tuple[tuple[str, str], ...] = ()

    __repr__ = brief

    @property
    def text(self) -> str:
        """All of it in words."""
        remat = ", rematerialised" if self.rematerialise else ""
        return (
            f"{self.schedule}, {self.microbatches} microbatches, meshes {self.meshes_text}, "
            f"{len(self.placement)} stages{remat}"
        )

    @property
    def meshes_text(self) -> str:
        """How many meshes, and their axes."""
        axes = " ".join(f"{name}={size}" for name, size in self.axes if size > 1)
        return f"{self.meshes} x {axes}" if axes else str(self.meshes)

    @property
    def meshes(self) -> int:
        return max(self.placement) + 1

    @functools.cached_property
    def devices(self) -> int:
        count = 1
        for _, size in self.axes:
            count *= size
        return count


@dataclasses.dataclass(frozen=True)
class PlanCandidate:
    """A choice with its prediction.

    Attributes:
        choice: stages, meshes and schedule.
        step_s: predicted seconds of a step; infinite where nothing can be predicted.
        bubble: the part of the step in which meshes wait, over all meshes.
        peak_bytes: for each mesh, the bytes that each of its devices holds at most.
        held: for each mesh, the bytes of each kind at the peak, over its devices.
        sent_bytes: bytes of a step between meshes.
        timeline: the predicted one.
        refused: why it cannot be used; "" if it can.
        is_measured: whether the seconds are from measured fragments.
        is_partitioned: whether seconds and bytes are of the program that it runs.
    """

    choice: PlanChoice
    step_s: float
    bubble: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    held: tuple[dict[str, int], ...] = ()
    sent_bytes: int = 0
    timeline: Timeline | None = None
    refused: str = ""
    is_measured: bool = False
    is_partitioned: bool = False

    def __repr__(self) -> str:
        most = f", at most {bytes_text(max(self.peak_bytes))} per device" if self.peak_bytes else ""
        figures = f"{seconds_text(self.step_s)} per step, bubble {self.bubble:.0%}{most}"
        refused = self.refused.partition("\n")[0]
        return clipped(f"{self.choice.text}: {refused or figures}", MAX_COLUMNS - 8)

    def _repr_svg_(self) -> str | None:
        """Its predicted timeline as a picture, for notebooks."""
        return None if self.timeline is None else self.timeline._repr_svg_()

    @property
    def order(self) -> tuple[Any, ...]:
        """What plans are ranked by: seconds, then fewer bytes, then fewer of everything."""
        choice = self.choice
        return (
            bool(self.refused),
            not self.is_measured,
            not self.is_partitioned,
            self.step_s,
            max(self.peak_bytes, default=0),
            choice.rematerialise,
            len(choice.placement),
            choice.microbatches,
            choice.schedule,
            choice.axes,
            choice.exchanges,
        )


Axes = tuple[tuple[str, int], ...]


class PlanCandidates(tuple[PlanCandidate, ...]):
    """Candidates in order; they print the first ones."""

    __slots__ = ()

    def __repr__(self) -> str:
        rows = (f"  {rank}. {candidate!r}" for rank, candidate in enumerate(self, 1))
        return few_lines([counted(len(self), "candidate"), *rows])


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
        device: of a device.
    """

    losses: Mapping[int, DivisionChoice]
    divisions: Sequence[tuple[int, Axes, StepSizes | str]]
    stages_per_mesh: Sequence[int]
    schedules: Sequence[str]
    rematerialise: Sequence[bool]
    memory: int | None
    device: Device

    def __len__(self) -> int:
        return (
            len(self.losses) * len(self.divisions) * len(self.stages_per_mesh) * len(self.schedules)
            * len(self.rematerialise)
        )  # fmt: skip


class PlanSearch:
    """Predicts the choices of a space, one after the other."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self._tables: dict[tuple[str, int, int, int, Sources | None], ScheduleTable | str] = {}
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
        units = self.space.losses[choice.microbatches].units
        sources = branches(units, starts)
        table = self._table(choice.schedule, stages, count, choice.microbatches, sources)
        if isinstance(table, str):
            return PlanCandidate(choice, float("inf"), refused=table) if per_mesh == 1 else None
        several = len(visits(table.stage_to_mesh)) > count
        if several != (per_mesh > 1) and count > 1:
            return None  # neighbouring stages of a mesh are one stage
        choice = dataclasses.replace(choice, starts=starts, placement=table.stage_to_mesh)
        costs = division_costs(
            units, starts, choice.devices, self.space.device, sizes, rematerialise=choice.rematerialise
        )
        return predict(choice, table, costs, self.space, sizes)

    def _starts_of(self, microbatches: int, stages: int, devices: int) -> tuple[int, ...] | None:
        key = microbatches, stages, devices
        if key not in self._starts:
            chain, device = self.space.losses[microbatches].units.chain, self.space.device
            division = None
            if len(chain) >= stages:
                meshes = Meshes((devices,) * stages, 2 / (device.link_bandwidth * devices))
                division, _ = choose(Segments(chain, meshes), stages)
            self._starts[key] = None if division is None else division.starts
        return self._starts[key]

    def _table(
        self, schedule: str, stages: int, meshes: int, microbatches: int, sources: Sources | None
    ) -> ScheduleTable | str:
        key = schedule, stages, meshes, microbatches, sources
        if key not in self._tables:
            try:
                self._tables[key] = get_schedule(schedule).table(
                    stages, meshes, microbatches, sources=sources
                )
            except ScheduleError as error:
                self._tables[key] = str(error).splitlines()[0]
        return self._tables[key]


def predict(
    choice: PlanChoice, table: ScheduleTable, costs: Costs, space: PlanSpace, sizes: StepSizes
) -> PlanCandidate:
    """The prediction of one choice, refused if it does not fit the memory."""
    names = [f"m{mesh}" for mesh in range(choice.meshes)]
    link = link_of(choice.devices, space.device)
    timeline = simulate(table, costs, link, mesh_names=names)
    update = update_seconds(costs, choice.placement, space.device, choice.devices, sizes)
    ends = [max((s.end_s for s in timeline.compute(name)), default=0.0) for name in names]
    step_s = max(end + seconds for end, seconds in zip(ends, update, strict=True))
    busy = sum(timeline.busy_s(name) for name in names) + sum(update)
    peaks = tuple(memory.peak_bytes // choice.devices for memory in timeline.memory)
    held = tuple(memory.at_peak for memory in timeline.memory)
    sent = sum(span.nbytes for span in timeline.transfers)
    bubble = 1 - busy / (step_s * len(names)) if step_s else 0.0
    candidate = PlanCandidate(choice, step_s, max(0.0, bubble), peaks, held, sent, timeline)
    return dataclasses.replace(candidate, refused=too_large(candidate, space.memory))


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
