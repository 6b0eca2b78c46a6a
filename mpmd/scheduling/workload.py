"""Input of the schedule generators: stages grouped into chains, with seconds and sizes.

Neighbouring stages of one mesh always run together, so a generator orders *steps*: a chain's forward,
backward or weight gradient on one microbatch.  ``expand`` turns steps into tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mpmd.brief import brief
from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.table import Phase, Placement, Task, Visit, visits
from mpmd.scheduling.task_costs import Costs, Link, Transfer, link_between

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
"""Kinds of steps.  ``BACKWARD`` is ``B``, or ``I`` where the backward is split."""

Step = tuple[int, int, int]
"""Kind, chain, microbatch."""


@dataclass(frozen=True)
class StageChain:
    """Neighbouring stages on one mesh, as the microbatches of one direction pass through them.

    Attributes:
        mesh: where it runs.
        stages: the stages in it.
        previous: the chain a microbatch comes from; None for the first.
        following: the chain it goes to; None for the last.
        microbatches: those that pass through.
    """

    mesh: int
    stages: range
    previous: int | None
    following: int | None
    microbatches: range

    __repr__ = brief

    def source(self, kind: int) -> int | None:
        """The chain whose forward or backward precedes this chain's; None for the first."""
        return self.previous if kind == FORWARD else self.following


@dataclass(frozen=True)
class Workload:
    """Chains with their costs.

    Attributes:
        num_meshes: number of meshes.
        chains: all chains, grouped by direction.
        splits: backwards are two steps.
        seconds: per chain, of its forward, backward and weight gradient.
        delays: per chain, seconds until the output of the previous chain is here, and the gradient of the
            following.
        sizes: per chain, its memory for one microbatch from its forward to the end of its backward.
    """

    num_meshes: int
    chains: tuple[StageChain, ...]
    splits: bool
    seconds: tuple[tuple[float, float, float], ...]
    delays: tuple[tuple[float, float], ...]
    sizes: tuple[int, ...]

    __repr__ = brief

    @property
    def kinds(self) -> tuple[int, ...]:
        return (FORWARD, BACKWARD, WEIGHTS) if self.splits else (FORWARD, BACKWARD)

    def chains_on(self, mesh: int) -> list[int]:
        """The chains of a mesh, in order."""
        return [index for index, chain in enumerate(self.chains) if chain.mesh == mesh]

    def work_s(self, mesh: int) -> float:
        """Seconds of all steps of a mesh."""
        return sum(
            self.seconds[index][kind] * len(self.chains[index].microbatches)
            for index in self.chains_on(mesh)
            for kind in self.kinds
        )


def unit_workload(
    shape: PipelineShape, splits: bool, mirror: Placement | None = None, split_turns: bool = False
) -> Workload:
    """Every chain takes one second per step, whole backwards two; sizes count stages.

    Args:
        shape: the pipeline; with a mirror, the second half of the microbatches uses the mirror's placement.
        splits: whether backwards are two steps.
        mirror: placement of the second copy of the stages.
        split_turns: stages of a mesh where the way turns back are two chains, one for each way.
    """
    chains = _chains(shape, mirror, _visits_with_split_turns if split_turns else visits)
    seconds = ((1.0, 1.0, 1.0) if splits else (1.0, 2.0, 0.0),) * len(chains)
    return Workload(shape.num_meshes, chains, splits, seconds, ((0.0, 0.0),) * len(chains), _sizes(chains))


def costed_workload(
    shape: PipelineShape,
    splits: bool,
    costs: Costs,
    transfer: Transfer,
    *,
    whole: Collection[int] = (),
    merge: bool = True,
    mirror: Placement | None = None,
) -> Workload:
    """Chains with the seconds of their stages and the delays of their transfers; sizes count stages.

    Args:
        shape: the pipeline.
        splits: whether backwards are two steps.
        costs: of the stages.
        transfer: links between meshes.
        whole: stages whose backward is never split; their weight gradients take no time of their own.
        merge: neighbouring stages of a mesh are one chain; otherwise every stage is its own.
        mirror: placement of the second copy of the stages.
    """
    chains = _chains(shape, mirror, _visits_with_split_turns if merge else _single_stages)
    seconds, delays = [], []
    for chain in chains:
        forward = backward = weights = 0.0
        for stage in chain.stages:
            cost = costs.stages[stage]
            forward += cost.forward_s
            backward += cost.input_gradient_s if splits and stage not in whole else cost.backward_s
            weights += cost.weight_gradient_s if splits and stage not in whole else 0.0
        seconds.append((forward, backward, weights))
        ahead = _delay(chains, chain.previous, chain, costs, transfer, forward=True)
        delays.append((ahead, _delay(chains, chain.following, chain, costs, transfer, forward=False)))
    return Workload(shape.num_meshes, chains, splits, tuple(seconds), tuple(delays), _sizes(chains))


def limits(shape: PipelineShape, microbatches: float) -> list[int]:
    """Per mesh, the memory of its stages for some microbatches, at least one, in the unit of `sizes`."""
    counts = (shape.placement.count(mesh) for mesh in range(shape.num_meshes))
    return [max(int(microbatches * count), count) for count in counts]


def _sizes(chains: Sequence[StageChain]) -> tuple[int, ...]:
    return tuple(len(chain.stages) for chain in chains)


def _delay(
    chains: Sequence[StageChain],
    source: int | None,
    chain: StageChain,
    costs: Costs,
    transfer: Transfer,
    forward: bool,
) -> float:
    if source is None or chains[source].mesh == chain.mesh:
        return 0.0
    stage = costs.stages[chains[source].stages[-1 if forward else 0]]
    link: Link = link_between(transfer, chains[source].mesh, chain.mesh)
    return link.wire_s(stage.output_bytes if forward else stage.input_gradient_bytes) + link.latency_s


def _chains(
    shape: PipelineShape, mirror: Placement | None, group: Callable[[Placement], list[Visit]]
) -> tuple[StageChain, ...]:
    count = shape.num_microbatches
    half = (count + 1) // 2 if mirror is not None else count
    chains: list[StageChain] = []
    for placement, microbatches in ((shape.placement, range(half)), (mirror, range(half, count))):
        if placement is None:
            continue
        way = group(placement)
        first = len(chains)
        for k, visit in enumerate(way):
            previous = first + k - 1 if k else None
            following = first + k + 1 if k + 1 < len(way) else None
            chains.append(StageChain(visit.mesh, visit.stages, previous, following, microbatches))
    return tuple(chains)


def _single_stages(placement: Placement) -> list[Visit]:
    return [Visit(mesh, range(stage, stage + 1)) for stage, mesh in enumerate(placement)]


def _visits_with_split_turns(placement: Placement) -> list[Visit]:
    """Visits before and after which a microbatch is on the same mesh, split in two."""
    way = visits(placement)
    split: list[Visit] = []
    for k, visit in enumerate(way):
        turns = 0 < k < len(way) - 1 and way[k - 1].mesh == way[k + 1].mesh
        if turns and len(visit.stages) > 1:
            middle = visit.stages[len(visit.stages) // 2]
            split.append(Visit(visit.mesh, range(visit.stages.start, middle)))
            split.append(Visit(visit.mesh, range(middle, visit.stages.stop)))
        else:
            split.append(visit)
    return split


def expand(workload: Workload, orders: Sequence[Sequence[Step]]) -> list[list[Task]]:
    """The tasks of the steps: forwards of a chain by rising stage, backwards by falling stage."""
    backward = Phase.I if workload.splits else Phase.B
    expanded: list[list[Task]] = []
    for order in orders:
        tasks: list[Task] = []
        for kind, index, microbatch in order:
            stages = workload.chains[index].stages
            if kind == FORWARD:
                tasks += (Task(s, microbatch, Phase.F) for s in stages)
            else:
                phase = backward if kind == BACKWARD else Phase.W
                tasks += (Task(s, microbatch, phase) for s in reversed(stages))
        expanded.append(tasks)
    return expanded
