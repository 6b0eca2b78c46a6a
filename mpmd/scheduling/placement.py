"""Which mesh holds which stage: the usual shapes, and questions about a given one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError

Placement = tuple[int, ...]
"""One mesh index per stage."""


def contiguous(num_stages: int, num_meshes: int) -> Placement:
    """Neighbouring stages together, sizes as equal as they get: 5 stages on 2 meshes are ``0 0 0 1 1``."""
    _need_stages(num_stages, num_meshes)
    small, larger = divmod(num_stages, num_meshes)
    return tuple(mesh for mesh in range(num_meshes) for _ in range(small + (mesh < larger)))


def looped(num_stages: int, num_meshes: int) -> Placement:
    """Round-robin: 5 stages on 2 meshes are ``0 1 0 1 0``."""
    _need_stages(num_stages, num_meshes)
    return tuple(stage % num_meshes for stage in range(num_stages))


def folded(num_stages: int, num_meshes: int) -> Placement:
    """Down and up again, without transfers where it turns: 5 stages on 2 meshes are ``0 1 1 0 0``."""
    _need_stages(num_stages, num_meshes)
    way = [*range(num_meshes), *reversed(range(num_meshes))]
    return tuple(way[stage % len(way)] for stage in range(num_stages))


def _need_stages(num_stages: int, num_meshes: int) -> None:
    if num_stages < num_meshes:
        raise ScheduleError(
            f"{num_stages} stages cannot be spread over {num_meshes} meshes: every mesh needs a stage\n"
            "  use fewer meshes or more stages, or say with stage_to_mesh which meshes are left out"
        )


@dataclass(frozen=True)
class Visit:
    """Neighbouring stages of one mesh, which a microbatch passes before it goes to another mesh."""

    mesh: int
    stages: range


def visits(placement: Sequence[int]) -> list[Visit]:
    """The placement as the meshes a microbatch visits, in order."""
    found: list[Visit] = []
    for stage, mesh in enumerate(placement):
        if found and found[-1].mesh == mesh:
            found[-1] = Visit(mesh, range(found[-1].stages.start, stage + 1))
        else:
            found.append(Visit(mesh, range(stage, stage + 1)))
    return found


def visits_of_mesh(placement: Sequence[int]) -> dict[int, int]:
    """How often a microbatch visits each mesh on its forward way."""
    return dict(Counter(visit.mesh for visit in visits(placement)))


def pipeline_positions(placement: Sequence[int], schedule: str) -> list[Visit]:
    """The visits of a placement that visits each mesh once, for schedules that need that.

    Raises:
        ScheduleError: some mesh is visited twice.
    """
    way = visits(placement)
    seen: dict[int, Visit] = {}
    for visit in way:
        if visit.mesh in seen:
            raise ScheduleError(
                f"schedule {schedule!r} comes to every mesh once, but mesh {visit.mesh} holds stage "
                f"{seen[visit.mesh].stages[-1]} and, after other meshes, stage {visit.stages[0]}\n"
                "  use interleaved_1f1b or looped_bfs, or give each mesh neighbouring stages"
            )
        seen[visit.mesh] = visit
    return way
