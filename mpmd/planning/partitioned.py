"""Predictions from partitioned candidates: the programs that they would run, priced and not compiled.

A program knows what an estimate does not: slices of the batch, what backwards really wait for, collectives
between the devices of a mesh.  Its devices need not be here: one that is stands for all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mpmd.api.aot import Lowered
from mpmd.compile.backends.targets import DESCRIBED
from mpmd.compile.driver import prepare_fragment
from mpmd.config.ambient import without_ambient_mesh
from mpmd.config.topology import Topology
from mpmd.cost.device import Device
from mpmd.errors import CompileError, MpmdError
from mpmd.estimate.program_timeline import Scratch
from mpmd.jax_compat import default_platform
from mpmd.planning.candidates import PlanCandidate, PlanChoice, PlanSpace, too_large
from mpmd.planning.result import config_for
from mpmd.runtime.program.stream_memory import MeshMemory, predict_memory
from mpmd.scheduling.timeline import Timeline
from mpmd.support.resources import garbage_kept
from mpmd.tracing.stages.select.division import products_work
from mpmd.tracing.trace import lower

_LESS_MEMORY = {"reduce_gradients": ("_reduce.", "per_microbatch"), "gather_weights": ("_gather.", "per_use")}
"""Options: what is in the names of programs that they add, and the value that adds none."""

_MAX_TRIED = 4
"""Candidates that are partitioned for each one that fits."""


@dataclasses.dataclass(frozen=True)
class AbsentDevices:
    """What candidates are priced for.

    Attributes:
        device: one of them.
        target: its name among the targets of the compiler.
        memory: its bytes; None for no limit.
    """

    device: Device
    target: str
    memory: int | None


def absent_devices(space: PlanSpace) -> AbsentDevices:
    """The devices of a search, for the products of its loss: other dtypes have other rates."""
    described, chosen = space.device, next(iter(space.losses.values()))
    flops, seconds = products_work([item.equation for item in chosen.units.items], described)
    device = described.with_products(flops / seconds) if seconds else described
    return AbsentDevices(device, described.name if described.name in DESCRIBED else "cpu", space.memory)


def partitioned_candidates(
    candidates: Sequence[PlanCandidate],
    count: int,
    devices: AbsentDevices,
    step_of: Callable[[PlanChoice, Any], Any],
    options: dict[str, Any],
    show: Callable[[str], None],
) -> list[PlanCandidate]:
    """The candidates; the best that fit are predicted from their programs.

    The estimates of the others are scaled by the median ratio of prediction to estimate.

    Args:
        candidates: with estimates.
        count: how many that fit to partition.
        devices: that they run on.
        step_of: traces a step with a number of microbatches under a configuration.
        options: of `make_config`.
        show: reports progress.
    """
    ranked = sorted((c for c in candidates if not c.refused), key=lambda c: c.order)
    partitioned: list[PlanCandidate] = []
    for candidate in ranked[: _MAX_TRIED * count]:
        if sum(not c.refused for c in partitioned) == count:
            break
        show(f"partitioning {len(partitioned) + 1}")
        partitioned.append(_best_exchange(candidate, devices, step_of, options))
    ratios = [
        new.step_s / old.step_s for new, old in zip(partitioned, ranked, strict=False) if new.is_partitioned
    ]
    scale = float(np.median(ratios)) if ratios else 1.0
    others = [dataclasses.replace(c, step_s=c.step_s * scale) for c in ranked[len(partitioned) :]]
    return [*partitioned, *others, *(c for c in candidates if c.refused)]


def _best_exchange(
    candidate: PlanCandidate, devices: AbsentDevices, step_of: Any, options: dict[str, Any]
) -> PlanCandidate:
    """With one reduction and one gather in a step, which is fastest; or as fits best, where that does not."""
    try:
        lowered = _lowered(candidate.choice, step_of, options)
        predicted = [_predicted(candidate, lowered, devices)]
        for exchanges in _others(lowered) if predicted[0].refused else ():
            choice = dataclasses.replace(candidate.choice, exchanges=exchanges)
            other = dataclasses.replace(candidate, choice=choice)
            predicted.append(_predicted(other, _lowered(choice, step_of, options), devices))
    except MpmdError as error:
        return dataclasses.replace(candidate, refused=str(error).splitlines()[0])
    return min(predicted, key=lambda c: (bool(c.refused), c.step_s if not c.refused else max(c.peak_bytes)))


def _others(lowered: Lowered) -> Iterator[tuple[tuple[str, str], ...]]:
    """Options that take programs that only exchange away."""
    names = [name for _, name in lowered.program.executables]
    free = [
        (option, value)
        for option, (part, value) in _LESS_MEMORY.items()
        if any(part in name for name in names)
    ]
    for count in range(1, len(free) + 1):
        yield from itertools.combinations(free, count)


@garbage_kept()
@without_ambient_mesh
def _lowered(choice: PlanChoice, step_of: Any, options: dict[str, Any]) -> Lowered:
    """The step on devices that need not be here; its warnings are of no step that runs."""
    traced = step_of(choice, config_for(choice, options, _topology(choice)))
    jax_lowered = lower(traced.jax_traced, default_platform())
    return Lowered(traced, jax_lowered, traced.partition(jax_lowered))


def _topology(choice: PlanChoice) -> Topology:
    names, sizes = zip(*choice.axes, strict=True)
    devices = np.array(jax.devices()[:1] * choice.devices).reshape(sizes)
    return Topology({f"m{mesh}": Mesh(devices, names) for mesh in range(choice.meshes)})


def _predicted(candidate: PlanCandidate, lowered: Lowered, devices: AbsentDevices) -> PlanCandidate:
    scratch = _scratch(lowered, devices.target)
    costs = lowered.estimated_costs(devices.device)
    timeline = lowered.schedule(costs)
    memory = {m.mesh: m for m in predict_memory(lowered.program, scratch.workspace, scratch.kept)}
    predicted = by_program(candidate, timeline, timeline.makespan_s, memory)
    refused = too_large(predicted, devices.memory)
    return dataclasses.replace(predicted, refused=refused, is_partitioned=True)


def by_program(
    candidate: PlanCandidate, timeline: Timeline, step_s: float, memory: Mapping[str, MeshMemory]
) -> PlanCandidate:
    """A candidate with a timeline of its program, and the bytes that it holds."""
    names = [f"m{mesh}" for mesh in range(candidate.choice.meshes)]
    of_mesh = [memory[name] for name in names]
    return dataclasses.replace(
        candidate,
        step_s=step_s,
        bubble=1 - sum(timeline.busy_s(name) for name in names) / (step_s * len(names)),
        peak_bytes=tuple(m.peak_bytes // candidate.choice.devices for m in of_mesh),
        held=tuple(m.by_category for m in of_mesh),
        sent_bytes=sum(s.nbytes for s in timeline.transfers if {s.mesh, s.peer} <= set(timeline.meshes)),
        timeline=timeline,
    )


def _scratch(lowered: Lowered, target: str) -> Scratch:
    """Temporary memory of fragments by our compiler; none of what it has no code for."""
    workspace, owned = dict[tuple[str, str], int](), dict[str, dict[str, int]]()
    for name, fragment in lowered.fragments.items():
        mesh = lowered.config.topology[fragment.mesh]
        try:
            program = prepare_fragment(fragment, DESCRIBED[target](), axes=dict(mesh.shape)).program
        except CompileError:
            continue
        if hasattr(program, "kept_bytes"):
            owned.setdefault(fragment.mesh, {})[fragment.fingerprint] = program.kept_bytes * mesh.size
        else:
            workspace[fragment.mesh, name] = program.arena_bytes * mesh.size
    return Scratch(workspace, owned)
