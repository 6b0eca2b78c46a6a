"""The tasks of one step, in order, for every mesh."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mpmd.scheduling.placement import Placement
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
        """The mesh of a task."""
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

    def with_whole_backward(self, stages: Collection[int], late: Collection[int] = ()) -> ScheduleTable:
        """The same order with ``I`` and ``W`` of these stages joined at the position of ``I``.

        For stages whose backward cannot be split, such as a first stage whose input needs no gradient.
        Nothing but ``W`` moves, and nothing waits for a ``W``, so a legal table stays legal.

        Args:
            stages: those whose backward is whole.
            late: those of them whose backward is at the position of ``W``: only stages whose input
            gradient no stage waits for.
        """
        kept = {s: Phase.W if s in late else Phase.I for s in stages}
        orders = tuple(
            tuple(
                Task(t.stage, t.microbatch, Phase.B) if t.stage in kept and t.phase is not Phase.F else t
                for t in order
                if t.stage not in kept or t.phase in (Phase.F, Phase.B, kept[t.stage])
            )
            for order in self.orders
        )
        splits = any(t.phase is Phase.I for order in orders for t in order)
        return ScheduleTable(orders, self.stage_to_mesh, splits, self.has_backward, self.mirror)

    def as_csv(self) -> str:
        """One line per mesh, tasks separated by commas: ``0F0,0F1,0B0,0B1``."""
        return "".join(",".join(map(str, order)) + "\n" for order in self.orders)
