"""1F1B: one forward and one backward in turn; with several stages a mesh, and earlier forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.definition import PipelineSchedule, PipelineShape, RoundRobinSchedule
from mpmd.scheduling.patterns import best_order, zigzag
from mpmd.scheduling.table import Phase, Task, Visit, chain_sources, pipeline_positions, readers_of
from mpmd.scheduling.workload import expand, unit_workload


@dataclass(frozen=True)
class OneFOneB(PipelineSchedule):
    """Warm up with as many forwards as meshes follow, then alternate backward and forward.

    Where stages branch, as many follow as on the longest way to the end: towers warm up, and go back, side
    by side.  Idle per mesh ``(p-1)(F+B)`` as GPipe, but position ``r`` of ``p`` holds at most ``p-r``
    microbatches.

    Source: Narayanan et al., PipeDream-Flush, 2021; Fan et al., DAPPLE, 2021.
    """

    name = "1f1b"

    def warm_up(self, following: int) -> int:
        """How many forwards run first on a mesh, by the meshes that follow it."""
        return following

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """Forwards first: as many as meshes follow, or as the schedule makes of that."""
        way = pipeline_positions(shape.placement, self.name)
        orders: list[list[Task]] = [[] for _ in range(shape.num_meshes)]
        for visit, following in zip(way, _meshes_following(way, shape), strict=True):
            orders[visit.mesh] = alternate(visit, self.warm_up(following), shape.num_microbatches)
        return orders


def _meshes_following(way: Sequence[Visit], shape: PipelineShape) -> list[int]:
    """For each visit the meshes after it, on the longest way to the end."""
    readers = readers_of(shape.sources or chain_sources(shape.num_stages))
    at = {stage: position for position, visit in enumerate(way) for stage in visit.stages}
    following = [0] * len(way)
    for position in reversed(range(len(way))):
        after = {at[reader] for stage in way[position].stages for reader in readers[stage]}
        following[position] = max((1 + following[a] for a in after if a != position), default=0)
    return following


def alternate(visit: Visit, warm_up: int, num_microbatches: int) -> list[Task]:
    """``warm_up`` forwards, then forward and backward in turn, then the remaining backwards."""
    order: list[Task] = []
    for turn in range(-warm_up, num_microbatches):
        forward = turn + warm_up
        if forward < num_microbatches:
            order += (Task(s, forward, Phase.F) for s in visit.stages)
        if turn >= 0:
            order += (Task(s, turn, Phase.B) for s in reversed(visit.stages))
    return order


@dataclass(frozen=True)
class EagerOneFOneB(OneFOneB):
    """1F1B with twice the warm-up: a transfer may take as long as a task without a wait.

    Idle as 1F1B when transfers are instant; position ``r`` of ``p`` holds ``min(m, 2(p-r)-1)`` microbatches.

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, 2022.
    """

    name = "eager_1f1b"

    def warm_up(self, following: int) -> int:
        """Twice as many."""
        return 2 * following


@dataclass(frozen=True)
class CombinedOneFOneB(OneFOneB):
    """1F1B in which a forward and a backward of different microbatches are one program.

    A compiler can run the communication of one, such as the all-to-all of experts, beside the computation of
    the other.  A message between neighbouring meshes has the time of a program, or the meshes would wait for
    each other in turns: the warm-up is twice as long as in 1F1B, and one more.  Idle per mesh as 1F1B;
    position ``r`` of ``p`` holds ``min(m, 2(p-r))`` microbatches.

    Source: the combined 1F1B of Megatron-LM; DeepSeek, DualPipe, 2025.
    """

    name = "combined_1f1b"

    def warm_up(self, following: int) -> int:
        """Twice as many, and one: no backward follows the forward of its own microbatch."""
        return 2 * following + 1

    def pairs(self, shape: PipelineShape) -> Sequence[tuple[Task, Task]]:
        """A forward after the warm-up, and the backward that it alternates with."""
        way = pipeline_positions(shape.placement, self.name)
        pairs: list[tuple[Task, Task]] = []
        for visit, following in zip(way, _meshes_following(way, shape), strict=True):
            last, ahead = visit.stages[-1], self.warm_up(following)
            pairs += (
                (Task(last, turn + ahead, Phase.F), Task(last, turn, Phase.B))
                for turn in range(shape.num_microbatches - ahead)
            )
        return pairs


@dataclass(frozen=True)
class Interleaved1F1B(RoundRobinSchedule):
    """1F1B over ``v`` stages per mesh, placed round-robin.

    Idle per mesh ``(p-1)(F+B)/v``; position ``r`` of ``p`` holds ``(v-1)p + 2(p-1-r) + 1`` stages'
    activations of a microbatch.  Where microbatches or stages do not divide evenly, the order comes from
    list scheduling within the same memory.

    Attributes:
        extra_warm_up: more forwards before the first backward; one hides transfers (the order of Kimi K2).
        group: microbatches that pass a stage together; None: as many as meshes.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
    """

    extra_warm_up: int = 0
    group: int | None = None

    name = "interleaved_1f1b"
    instead = "1f1b"

    def __post_init__(self) -> None:
        if self.extra_warm_up < 0 or (self.group is not None and self.group < 1):
            raise ScheduleError(
                "schedule 'interleaved_1f1b': extra_warm_up must not be negative and group at least 1, "
                f"got {self.extra_warm_up} and {self.group}"
            )

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """``(v-1)p + 2(p-1-r)`` forwards first, where ``r`` is the position of the mesh in the pipeline."""
        workload = unit_workload(shape, splits=False)
        meshes = len({chain.mesh for chain in workload.chains})
        size = self.group or meshes

        def warm_up(place: int, chains: int) -> int:
            return (chains - 1) * size + 2 * (meshes - 1 - place) + self.extra_warm_up

        return expand(workload, best_order(workload, zigzag(workload, warm_up, size)).orders)
