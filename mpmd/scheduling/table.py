"""What a schedule is, and the table of tasks it produces."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.placement import Placement, contiguous
from mpmd.scheduling.task import Phase, Task


@dataclass(frozen=True)
class Mirror:
    """A second copy of every stage, used by some of the microbatches (bidirectional pipelines).

    Attributes:
        stage_to_mesh: where the second copy of each stage lives.
        first_microbatch: this and all later microbatches use the second copies.
    """

    stage_to_mesh: Placement
    first_microbatch: int


@dataclass(frozen=True)
class ScheduleTable:
    """The tasks of one step, in order, for every mesh.

    Attributes:
        orders: per mesh its tasks in the order they run.
        stage_to_mesh: the mesh index of each stage.
        splits_backward: some backward is two tasks, ``I`` and ``W``.
        has_backward: False for evaluation and inference.
        mirror: the second copy of the stages, if there is one.
    """

    orders: tuple[tuple[Task, ...], ...]
    stage_to_mesh: Placement
    splits_backward: bool = False
    has_backward: bool = True
    mirror: Mirror | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_to_mesh)

    @property
    def num_meshes(self) -> int:
        """Number of meshes, those without tasks included."""
        return len(self.orders)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches: one more than the largest that occurs."""
        return 1 + max((task.microbatch for task in self.tasks()), default=-1)

    def tasks(self) -> Iterator[Task]:
        """All tasks, mesh by mesh."""
        for order in self.orders:
            yield from order

    def placement_of(self, microbatch: int) -> Placement:
        """The mesh of each stage, as this microbatch sees it."""
        if self.mirror is not None and microbatch >= self.mirror.first_microbatch:
            return self.mirror.stage_to_mesh
        return self.stage_to_mesh

    def mesh_of(self, task: Task) -> int:
        """The mesh on which a task runs."""
        return self.placement_of(task.microbatch)[task.stage]

    @functools.cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((t.stage, t.microbatch) for t in self.tasks() if t.phase in (Phase.I, Phase.W))

    def backward_phases(self, stage: int, microbatch: int) -> tuple[Phase, ...]:
        """``(B,)``, ``(I, W)``, or nothing in a table without backward."""
        if not self.has_backward:
            return ()
        return (Phase.I, Phase.W) if (stage, microbatch) in self._split else (Phase.B,)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """The tasks whose results a task needs.

        ``F(s)`` needs ``F(s-1)``; ``B(s)`` and ``I(s)`` need ``F(s)`` and the ``B`` or ``I`` of ``s+1``;
        ``W(s)`` needs ``I(s)``; all on the same microbatch.
        """
        stage, microbatch = task.stage, task.microbatch
        if task.phase is Phase.F:
            return (Task(stage - 1, microbatch, Phase.F),) if stage else ()
        if task.phase is Phase.W:
            return (Task(stage, microbatch, Phase.I),)
        forward = Task(stage, microbatch, Phase.F)
        if stage + 1 == self.num_stages:
            return (forward,)
        return (forward, Task(stage + 1, microbatch, self.backward_phases(stage + 1, microbatch)[0]))

    def with_whole_backward(self, stages: Sequence[int]) -> ScheduleTable:
        """The same order with ``I`` and ``W`` of these stages joined where ``I`` stood.

        For stages whose backward cannot be split, such as a first stage whose input needs no gradient.
        Nothing but ``W`` moves, and nothing waits for a ``W``, so a legal table stays legal.
        """
        whole = frozenset(stages)
        orders = tuple(
            tuple(
                Task(t.stage, t.microbatch, Phase.B) if t.stage in whole and t.phase is Phase.I else t
                for t in order
                if not (t.stage in whole and t.phase is Phase.W)
            )
            for order in self.orders
        )
        splits = any(t.phase is Phase.I for order in orders for t in order)
        return ScheduleTable(orders, self.stage_to_mesh, splits, self.has_backward, self.mirror)

    def as_csv(self) -> str:
        """One line per mesh, tasks separated by commas: ``0F0,0F1,0B0,0B1``."""
        return "".join(",".join(map(str, order)) + "\n" for order in self.orders)


@dataclass(frozen=True)
class Shape:
    """What a schedule is asked to order: meshes, microbatches, and the mesh of each stage."""

    num_meshes: int
    num_microbatches: int
    placement: Placement

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.placement)


@dataclass(frozen=True)
class PipelineSchedule(ABC):
    """A rule that orders the tasks of any number of stages, meshes and microbatches.

    A schedule is a frozen dataclass whose fields are its options.  It defines ``orders`` and, where it
    differs from neighbouring stages together, ``placement``.
    """

    name = ""
    splits_backward = False
    has_backward = True

    def placement(self, num_stages: int, num_meshes: int) -> Placement:
        """Where this schedule puts the stages if the user does not say."""
        return contiguous(num_stages, num_meshes)

    @abstractmethod
    def orders(self, shape: Shape) -> Sequence[Sequence[Task]]:
        """Per mesh, its tasks in order."""

    def mirror(self, shape: Shape) -> Mirror | None:
        """The second copy of the stages; most schedules have none."""
        return None

    def table(
        self,
        num_stages: int,
        num_meshes: int,
        num_microbatches: int,
        stage_to_mesh: Sequence[int] | None = None,
    ) -> ScheduleTable:
        """The tasks of one step in order.

        Args:
            num_stages: stages of the program, at least one.
            num_meshes: meshes of the topology.
            num_microbatches: microbatches of one step, at least one.
            stage_to_mesh: the mesh index of each stage; by default the schedule's own ``placement``.

        Raises:
            ScheduleError: the schedule cannot order this.
        """
        for what, number in (("stage", num_stages), ("mesh", num_meshes), ("microbatch", num_microbatches)):
            if number < 1:
                raise ScheduleError(f"schedule {self.name!r} needs at least one {what}, got {number}")
        if stage_to_mesh is None:
            placement = self.placement(num_stages, num_meshes)
        else:
            placement = _checked_placement(tuple(stage_to_mesh), num_stages, num_meshes)
        shape = Shape(num_meshes, num_microbatches, placement)
        orders = tuple(tuple(order) for order in self.orders(shape))
        splits = any(task.phase is Phase.I for order in orders for task in order)
        return ScheduleTable(orders, placement, splits, self.has_backward, self.mirror(shape))


def _checked_placement(placement: Placement, num_stages: int, num_meshes: int) -> Placement:
    if len(placement) != num_stages:
        raise ScheduleError(f"stage_to_mesh names {len(placement)} stages, the program has {num_stages}")
    for stage, mesh in enumerate(placement):
        if not 0 <= mesh < num_meshes:
            raise ScheduleError(
                f"stage_to_mesh puts stage {stage} on mesh {mesh}, but the meshes are 0 to {num_meshes - 1}"
            )
    return placement
