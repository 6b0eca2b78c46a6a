"""`mpmd.plan`: how to run a step on some devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpmd.config.described import described_world
from mpmd.cost.device import Device, bytes_of, device_of
from mpmd.errors import ConfigError, SignatureError
from mpmd.jax_compat import default_platform
from mpmd.planning.candidates import Axes, PlanCandidate, PlanCandidates, PlanSearch, PlanSpace, StepSizes
from mpmd.planning.measure import measured_candidates
from mpmd.planning.partitioned import absent_devices, partitioned_candidates
from mpmd.planning.probe import StepProbe, axes_for, binder, first_line
from mpmd.planning.result import Plan
from mpmd.scheduling.catalogue import SCHEDULES
from mpmd.support.progress import ProgressLine
from mpmd.tracing.stages.select.automatic import DivisionChoice

SCHEDULES_TRIED = ("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "looped_bfs", "zb_v")


def plan(
    step: Callable[..., Any],
    *args: Any,
    devices: int,
    memory: str | int | None = None,
    microbatches: Sequence[int] | None = None,
    stages_per_mesh: Sequence[int] = (1, 2),
    schedules: Sequence[str] = SCHEDULES_TRIED,
    rematerialise: Sequence[bool] = (False, True),
    axes: Sequence[str] = ("data",),
    in_shardings: Any = None,
    out_shardings: Any = None,
    device: str | None = None,
    partition: int = 3,
    measure: int = 0,
    **kwargs: Any,
) -> Plan:
    """Searches for the fastest way to run a step on some devices.

        plan = mpmd.plan(step, params, batch, devices=8, memory="80GiB", microbatches=(8, 16, 32))
        print(plan)
        train_step = mpmd.jit(plan.step, plan.config, donate_argnums=0)

    All combinations of these are estimated; stages are divided by cost as with `stages="auto"`.  The best are
    partitioned: step and memory are then of the programs that they run, with one reduction and one gather
    in a step, or more where these do not fit.  Equal input gives equal plans.

    Args:
        step: the train step, which calls `mpmd.accumulate_gradients` or `mpmd.staged`.  To vary the number of
            microbatches it takes a keyword argument `num_microbatches`.
        *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
        devices: how many there are; all of them are used.
        memory: of each device: bytes, or such as `"80GiB"`; by default there is no limit.
        microbatches: numbers to try; by default the number that the step has.
        stages_per_mesh: numbers to try.
        schedules: names to try.
        rematerialise: whether to try stages as they are, under a checkpoint, or both.
        axes: names of the axes of each mesh, whose sizes are tried.
        in_shardings: as in `make_config`; without it meshes have one device each.
        out_shardings: likewise.
        device: a device that the compiler describes, such as `"H100"`; by default about the one here.
        partition: how many of the best that fit to partition; they are ranked first.
        measure: of how many of the best to compile and measure the fragments, each alone, for a prediction
            from that; they are ranked first.  The devices must be here.
        **kwargs: keyword arguments of the step.

    Returns:
        A `Plan`: candidates in order, with a table, pictures and configurations.

    Raises:
        ConfigError: an option cannot be used, or nothing fits; says why the best ones do not.
    """
    _check(devices, schedules, stages_per_mesh, axes, measure, partition)
    bind = binder(step, microbatches)
    probe = StepProbe(args, kwargs, axes, in_shardings)
    described, start = _described(device), time.perf_counter()
    with ProgressLine("plan") as progress:
        losses = _losses(probe, bind, microbatches, described, progress)
        space = PlanSpace(
            losses, _divisions(devices, axes, probe, losses), tuple(stages_per_mesh), tuple(schedules),
            tuple(rematerialise), bytes_of(memory, "memory"), described,
        )  # fmt: skip
        options = {"in_shardings": in_shardings, "out_shardings": out_shardings}
        tried, show = _search(space, progress), progress.show
        if partition:
            step_of = probe.tracer(bind, next(iter(losses.values())))
            tried = partitioned_candidates(tried, partition, absent_devices(space), step_of, options, show)
        if measure:
            tried = measured_candidates(tried, measure, bind, options, args, kwargs, show)
    return Plan(*_ranked(tried), bind, options, time.perf_counter() - start)


def _ranked(
    candidates: Sequence[PlanCandidate],
) -> tuple[PlanCandidates, PlanCandidates]:
    """The candidates that can be used, best first, and the others.

    Raises:
        ConfigError: none can be used.
    """
    ranked = sorted(candidates, key=lambda c: c.order)
    usable = PlanCandidates(c for c in ranked if not c.refused)
    unusable = PlanCandidates(c for c in ranked if c.refused)
    if not usable:
        raise ConfigError(_nothing_fits(unusable))
    return usable, unusable


def _divisions(
    devices: int, axes: Sequence[str], probe: StepProbe, losses: dict[int, DivisionChoice]
) -> list[tuple[int, Axes, StepSizes | str]]:
    """Every number of meshes with the axes of each, and the sizes of the step there, or why not."""
    loss, divisions = next(iter(losses.values())), list[tuple[int, Axes, StepSizes | str]]()
    for count in (n for n in range(devices, 0, -1) if devices % n == 0):
        for sizes in axes_for(devices // count, axes):
            divisions.append((count, tuple(sizes.items()), probe.sizes(loss, losses, sizes)))
    return divisions


def _losses(
    probe: StepProbe,
    bind: Any,
    microbatches: Sequence[int] | None,
    device: Device,
    progress: ProgressLine,
) -> dict[int, DivisionChoice]:
    """The chain of the loss for each number of microbatches.

    Raises:
        ConfigError: the step has no loss to divide, or its batch cannot be split into any of the numbers.
    """
    chains: dict[int, DivisionChoice] = {}
    problems: list[str] = []
    for count in microbatches or (0,):
        progress.show(f"tracing {count} microbatches" if count else "tracing")
        try:
            loss, number = probe.loss(bind(count), device)
        except SignatureError as error:
            problems.append(f"{count} microbatches: {first_line(error)}")
            continue
        chains[number] = loss
    if not chains:
        raise ConfigError("\n  ".join(["no number of microbatches can be used:", *problems]))
    return chains


def _search(space: PlanSpace, progress: ProgressLine) -> list[PlanCandidate]:
    candidates = []
    for number, candidate in enumerate(PlanSearch(space).candidates()):
        progress.show("plans", number, len(space))
        if candidate is not None:
            candidates.append(candidate)
    return candidates


def _nothing_fits(refused: Sequence[PlanCandidate]) -> str:
    reasons = list(dict.fromkeys(candidate.refused for candidate in refused))
    lines = ["no plan can be used:", *reasons[:6]]
    return "\n  ".join(
        [*lines, "use more devices, rematerialise=(True,), smaller microbatches, or sharded arguments"]
    )


def _described(device: str | None) -> Device:
    if device is not None:
        return Device.parse(device)
    described = described_world()
    return described.device if described else device_of(default_platform())


def _check(devices: Any, schedules: Any, per_mesh: Any, axes: Any, measure: Any, partition: Any) -> None:
    """Refuses options of the wrong kind.

    Raises:
        ConfigError: one of them.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigError(f"devices is {devices!r}; it must be a number from 1")
    unknown = [name for name in schedules if name not in SCHEDULES]
    if unknown or isinstance(schedules, str):
        raise ConfigError(f"schedules is {schedules!r}; there are {', '.join(SCHEDULES)}")
    if isinstance(axes, str) or not axes:
        raise ConfigError(f"axes is {axes!r}; it must list names of axes, such as ('data', 'model')")
    known = isinstance(measure, int) and isinstance(partition, int)
    numbers = [*per_mesh, measure + 1, partition + 1] if known else [0]
    if not all(isinstance(n, int) and n > 0 for n in numbers):
        raise ConfigError("stages_per_mesh must be numbers from 1, measure and partition numbers from 0")
