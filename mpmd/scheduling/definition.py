"""Pipeline schedules: rules that order the tasks of any pipeline."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mpmd.brief import brief
from mpmd.errors import ScheduleError
from mpmd.scheduling.table import (
    Mirror,
    Phase,
    Placement,
    ScheduleTable,
    Sources,
    Task,
    contiguous,
    looped,
    visits_of_mesh,
)
from mpmd.scheduling.validate import validate


@dataclass(frozen=True)
class PipelineShape:
    """The input of a schedule: meshes, microbatches, the mesh of each stage, and branches.

    An order for a chain of the stages is legal for branches too, so a schedule may ignore `sources`.
    """

    num_meshes: int
    num_microbatches: int
    placement: Placement
    sources: Sources | None = None

    __repr__ = brief

    @property
    def num_stages(self) -> int:
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
        """The mesh of each stage if the user does not choose."""
        return contiguous(num_stages, num_meshes)

    def _repr_svg_(self) -> str:
        """Its order on four meshes with eight microbatches as a picture, for notebooks."""
        return self.smallest_table(4, 8)._repr_svg_()

    def smallest_table(self, num_meshes: int, num_microbatches: int) -> ScheduleTable:
        """The order for one stage on each mesh, or for two where one has nothing to order.

        Raises:
            ScheduleError: it orders neither.
        """
        with contextlib.suppress(ScheduleError):
            placement = self.placement(num_meshes, num_meshes)
            if not self.remarks(PipelineShape(num_meshes, num_microbatches, placement)):
                return self.table(num_meshes, num_meshes, num_microbatches)
        return self.table(2 * num_meshes, num_meshes, num_microbatches)

    def remarks(self, shape: PipelineShape) -> list[str]:
        """Warnings for the user: that this schedule has no advantage on such a shape."""
        return []

    @abstractmethod
    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """Per mesh, its tasks in order."""

    def pairs(self, shape: PipelineShape) -> Sequence[tuple[Task, Task]]:
        """Tasks that are one program with their neighbour; most schedules have none."""
        return ()

    def mirror(self, shape: PipelineShape) -> Mirror | None:
        """The second copy of the stages; most schedules have none."""
        return None

    def table(
        self,
        num_stages: int,
        num_meshes: int,
        num_microbatches: int,
        stage_to_mesh: Sequence[int] | None = None,
        sources: Sources | None = None,
    ) -> ScheduleTable:
        """The tasks of one step in order, verified to be legal.

        Args:
            num_stages: stages of the program, at least one.
            num_meshes: meshes of the topology.
            num_microbatches: microbatches of one step, at least one.
            stage_to_mesh: the mesh index of each stage; by default the schedule's own ``placement``.
            sources: for each stage the earlier ones whose values it reads; None for a chain.

        Raises:
            ScheduleError: the schedule cannot order this, or its order is illegal.
        """
        for what, number in (("stage", num_stages), ("mesh", num_meshes), ("microbatch", num_microbatches)):
            if not isinstance(number, int) or number < 1:
                raise ScheduleError(f"schedule {self.name!r} needs at least one {what}, got {number!r}")
        if stage_to_mesh is None:
            placement = self.placement(num_stages, num_meshes)
        else:
            placement = checked_placement(stage_to_mesh, num_stages, num_meshes)
        if sources is not None:
            _check_sources(sources, num_stages)
        shape = PipelineShape(num_meshes, num_microbatches, placement, sources)
        orders = tuple(tuple(order) for order in self.orders(shape))
        splits = any(task.phase is Phase.I for order in orders for task in order)
        table = ScheduleTable(
            orders,
            placement,
            splits,
            self.has_backward,
            self.mirror(shape),
            sources,
            pairs=tuple(self.pairs(shape)),
        )
        validate(table, num_microbatches)
        return table


def _check_sources(sources: Sources, num_stages: int) -> None:
    """Checks that there are sources for each stage, all before it.

    Raises:
        ScheduleError: there are not.
    """
    if len(sources) != num_stages:
        raise ScheduleError(f"sources are given for {len(sources)} stages, the program has {num_stages}")
    for stage, before in enumerate(sources):
        wrong = [source for source in before if not 0 <= source < stage]
        if wrong:
            raise ScheduleError(
                f"stage {stage} cannot read stage {wrong[0]}: the sources of a stage have smaller numbers"
            )


def checked_placement(stage_to_mesh: Any, num_stages: int, num_meshes: int) -> Placement:
    """The mesh of each stage, as the user gave it.

    Raises:
        ScheduleError: there are more or fewer stages, or a mesh is unknown.
    """
    if isinstance(stage_to_mesh, str) or not isinstance(stage_to_mesh, Iterable):
        raise ScheduleError(
            f"stage_to_mesh must list the mesh of each stage, got {stage_to_mesh!r}\n"
            "  such as (0, 1, 1, 0): the numbers of meshes in the topology"
        )
    placement = tuple(stage_to_mesh)
    if len(placement) != num_stages:
        raise ScheduleError(
            f"stage_to_mesh names {len(placement)} stages, the program has {num_stages}\n"
            "  give the number of one mesh for each stage"
        )
    for stage, mesh in enumerate(placement):
        if not isinstance(mesh, int) or not 0 <= mesh < num_meshes:
            raise ScheduleError(
                f"stage_to_mesh puts stage {stage} on mesh {mesh!r}, but the meshes are 0 to {num_meshes - 1}"
            )
    return placement


@dataclass(frozen=True)
class RoundRobinSchedule(PipelineSchedule):
    """A schedule over several stages per mesh, placed round-robin."""

    instead: ClassVar[str]
    """The schedule that does the same where a mesh has one stage."""

    def placement(self, num_stages: int, num_meshes: int) -> Placement:
        return looped(num_stages, num_meshes)

    def remarks(self, shape: PipelineShape) -> list[str]:
        """Whether there are rounds at all."""
        if any(count > 1 for count in visits_of_mesh(shape.placement).values()):
            return []
        return [
            f"schedule {self.name!r} comes to every mesh several times, but here to each once: it has "
            "nothing to interleave\n  give each mesh several stages that are not neighbours, "
            f"or use {self.instead}"
        ]
