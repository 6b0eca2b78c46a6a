"""Costs of the stages of one division, for the simulator."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from mpmd.scheduling.task_costs import Costs, Link, StageCosts
from mpmd.tracing.stages.select.chains import UnitChain
from mpmd.tracing.stages.select.division import REMATERIALISED, DeviceRates, Meshes, Segments


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
    rates: DeviceRates,
    sizes: StepSizes,
    *,
    rematerialise: bool,
) -> Costs:
    """Seconds and bytes of the stages between starts; bytes are over all devices of a mesh.

    Args:
        units: the chain of the loss for one microbatch.
        starts: the first units of all stages but the first.
        devices: of each mesh; they share the work evenly.
        rates: of one device.
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
    for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
        parameters = int(segments.owned(begin, end)[0])
        forward = (forward_s[end] - forward_s[begin]) / devices
        backward = segments.seconds(stage, begin, end) - forward
        again = (repeated[end] - repeated[begin]) / devices if rematerialise else 0.0
        exchanged = [chain.crossing[unit] for unit in exchanges if begin < unit <= end]
        exchange = sum(_all_reduce_s(size / sizes.rows, devices // sizes.rows, rates) for size in exchanged)
        values = kept[end] - kept[begin]
        replicas = devices // sizes.state_shards
        stages.append(
            StageCosts(
                forward_s=rates.start_s + forward + exchange / 2,
                backward_s=rates.start_s + backward + again + exchange / 2,
                input_gradient_s=rates.start_s + backward / 2 + again + exchange / 2,
                weight_gradient_s=rates.start_s + backward / 2,
                output_bytes=chain.crossing[end] if end < len(chain) else 0,
                input_gradient_bytes=chain.crossing[begin] if begin else 0,
                residual_bytes=chain.crossing[begin] if rematerialise else values,
                workspace_bytes=values if rematerialise else max(chain.residuals[begin:end]),
                parameter_bytes=int(parameters * sizes.state) * replicas,
                gradient_bytes=parameters * replicas,
                batch_bytes=sum(size for size, readers in units.batch if begin <= readers[0] < end)
                * (devices // sizes.rows),
            )
        )
    return Costs(tuple(stages))


def _repeated(seconds: float, forward: float) -> float:
    """Seconds of the forward of a unit that no checkpoint computes again yet."""
    return forward if seconds < forward * REMATERIALISED * 0.99 else 0.0


def _all_reduce_s(nbytes: float, devices: int, rates: DeviceRates) -> float:
    """Seconds of a ring over the devices of a mesh."""
    if devices < 2:
        return 0.0
    return 2 * (devices - 1) * (rates.link_s + nbytes / devices / rates.link_bandwidth)


def link_of(devices: int, rates: DeviceRates) -> Link:
    """The link between two meshes of so many devices, each of which sends its share."""
    return Link(latency_s=rates.link_s, bytes_per_s=rates.link_bandwidth * devices)


def update_seconds(
    costs: Costs, placement: Sequence[int], rates: DeviceRates, devices: int, sizes: StepSizes
) -> list[float]:
    """Seconds of what each mesh does once in a step.

    The optimizer reads and writes its state.  Gradients are reduced over the devices that split the batch;
    where these split the parameters too, each is reduced into its part and gathered, in as many bytes.
    """
    seconds = [0.0] * (max(placement) + 1)
    for stage, mesh in zip(costs.stages, placement, strict=True):
        traffic = 2 * stage.parameter_bytes + stage.gradient_bytes
        seconds[mesh] += traffic / devices / rates.bandwidth
        parameters = stage.gradient_bytes * sizes.state_shards / devices
        seconds[mesh] += _all_reduce_s(parameters * sizes.rows / devices, sizes.rows, rates)
    return seconds
