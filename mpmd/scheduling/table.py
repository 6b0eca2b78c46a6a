"""Tasks, their orders on named meshes, the meshes of stages, and tables of tasks in order for every mesh."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mpmd.brief import brief, counted, few
from mpmd.errors import ScheduleError


class Phase(enum.Enum):
    """The work of a task for its stage.

    ``B`` is the whole backward.  A split backward is ``I``, which produces the input of the previous stage's
    backward, followed at any later time by ``W``, whose results stay on the mesh.
    """

    F = "F"  # forward
    B = "B"  # whole backward
    I = "I"  # gradient of the stage's input: the half that keeps its position when a backward is split
    W = "W"  # gradient of the stage's weights: the half that may come later

    @property
    def is_backward(self) -> bool:
        return self is not Phase.F

    @property
    def sends_gradient(self) -> bool:
        """True for the phases whose result the previous stage's backward needs."""
        return self is Phase.B or self is Phase.I


_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class Task:
    """One phase of one stage on one microbatch; ``0F2`` is the forward of stage 0 on microbatch 2."""

    stage: int
    microbatch: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Task:
        """The task written ``text``: stage, phase letter, microbatch, as in ``1B0``.

        Raises:
            ScheduleError: the text is not a task.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text.strip()!r} is not a task\n"
                "  expected: stage, one of the phases F B I W, microbatch; for example 0F0, 1B3 or 2W1"
            )
        return Task(int(match[1]), int(match[3]), Phase(match[2]))


@dataclass(frozen=True)
class TaskOrders:
    """Mesh → its tasks in order.  Text: `m1:0F0,0F1,0B0,0B1;m2:1F0,1B0+1F1,1B1`.

    Attributes:
        of_mesh: the tasks of each mesh.
        pairs: neighbours that run as one program, with a `+` between in text.

    Raises:
        ScheduleError: a task occurs twice, a mesh has two orders, or a pair is not of neighbours.
    """

    of_mesh: tuple[tuple[str, tuple[Task, ...]], ...] = ()
    pairs: tuple[tuple[Task, Task], ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        seen: dict[Task, str] = {}
        for mesh, tasks in self.of_mesh:
            for task in tasks:
                if task in seen:
                    raise ScheduleError(
                        f"task {task} occurs twice: on mesh {seen[task]!r} and on {mesh!r}\n"
                        "  a task runs once: leave one of them out"
                    )
                seen[task] = mesh
        meshes = Counter(mesh for mesh, _ in self.of_mesh)
        for mesh, orders in meshes.items():
            if orders > 1:
                raise ScheduleError(f"mesh {mesh!r} has two orders\n  join them: '{mesh}:0F0,1F0'")
        neighbours = {pair for _, tasks in self.of_mesh for pair in itertools.pairwise(tasks)}
        paired = [task for pair in self.pairs for task in pair]
        for first, second in self.pairs:
            if (first, second) not in neighbours or paired.count(first) + paired.count(second) > 2:
                raise ScheduleError(
                    f"tasks {first} and {second} cannot be one program\n"
                    "  they must be neighbours on a mesh, in that order, and in no other pair"
                )

    @staticmethod
    def parse(text: str) -> TaskOrders:
        """The orders in a text.

        Raises:
            ScheduleError: a part of the text is not the order of a mesh, or has a task twice.
        """
        of_mesh, pairs = [], list[tuple[Task, Task]]()
        for part in filter(None, (p.strip() for p in text.split(";"))):
            mesh, colon, tasks = part.rpartition(":")
            if not colon or not mesh:
                raise ScheduleError(
                    f"{part!r} is not an order of a mesh: expected MESH:TASK,TASK\n"
                    "  for example m1:0F0,0B0;m2:1F0,1B0"
                )
            groups = [tuple(map(Task.parse, t.split("+"))) for t in tasks.split(",") if t.strip()]
            of_mesh.append((mesh.strip(), tuple(task for group in groups for task in group)))
            pairs += (pair for group in groups for pair in itertools.pairwise(group))
        return TaskOrders(tuple(of_mesh), tuple(pairs))

    def __str__(self) -> str:
        second = {b for _, b in self.pairs}
        texts = []
        for mesh, tasks in self.of_mesh:
            order = "".join(f"{'+' if task in second else ','}{task}" for task in tasks)
            texts.append(f"{mesh}:{order[1:]}")
        return ";".join(texts)


Placement = tuple[int, ...]
"""One mesh index per stage."""


Sources = tuple[tuple[int, ...], ...]
"""For each stage the earlier ones that it reads: ``((), (), (0, 1))`` is two towers and what joins them."""


def branching(sources: Sequence[Collection[int]]) -> Sources | None:
    """The sources of stages with branches; None if each reads the one before, as in a chain."""
    if all(stage - 1 in before for stage, before in enumerate(sources) if stage):
        return None
    return tuple(tuple(sorted(before)) for before in sources)


def chain_sources(num_stages: int) -> Sources:
    """Each stage reads the one before."""
    return tuple((stage - 1,) if stage else () for stage in range(num_stages))


def readers_of(sources: Sources) -> Sources:
    """For each stage those that read its values."""
    readers: list[list[int]] = [[] for _ in sources]
    for stage, before in enumerate(sources):
        for source in before:
            readers[source].append(stage)
    return tuple(map(tuple, readers))


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
    way: list[Visit] = []
    for stage, mesh in enumerate(placement):
        if way and way[-1].mesh == mesh:
            way[-1] = Visit(mesh, range(way[-1].stages.start, stage + 1))
        else:
            way.append(Visit(mesh, range(stage, stage + 1)))
    return way


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


@dataclass(frozen=True)
class Mirror:
    """A second copy of every stage, used by some of the microbatches (bidirectional pipelines).

    Attributes:
        stage_to_mesh: where the second copy of each stage lives.
        first_microbatch: this and all later microbatches use the second copies.
    """

    stage_to_mesh: Placement
    first_microbatch: int

    __repr__ = brief


@dataclass(frozen=True)
class ScheduleTable:
    """The tasks of one step, in order, for every mesh.

    Attributes:
        orders: per mesh its tasks in the order they run.
        stage_to_mesh: the mesh index of each stage.
        splits_backward: some backward is two tasks, ``I`` and ``W``.
        has_backward: False for evaluation and inference.
        mirror: the second copy of the stages, if there is one.
        sources: of stages with branches; None for a chain.
        frozen: the stages that have no backward, though others have one.
        pairs: neighbours that are one program.
    """

    orders: tuple[tuple[Task, ...], ...]
    stage_to_mesh: Placement
    splits_backward: bool = False
    has_backward: bool = True
    mirror: Mirror | None = None
    sources: Sources | None = None
    frozen: frozenset[int] = frozenset()
    pairs: tuple[tuple[Task, Task], ...] = ()

    def __repr__(self) -> str:
        facts = [
            f"{counted(self.num_stages, 'stage')} on {counted(self.num_meshes, 'mesh')}",
            counted(self.num_microbatches, "microbatch"),
            counted(sum(map(len, self.orders)), "task"),
            "forward only" if not self.has_backward else "split backward" if self.splits_backward else "",
            "two copies of each stage" if self.mirror else "",
            f"frozen stages {few(sorted(self.frozen))}" if self.frozen else "",
            f"{counted(len(self.pairs), 'pair')} of tasks in one program" if self.pairs else "",
        ]
        return f"ScheduleTable of {', '.join(filter(None, facts))}"

    def _repr_svg_(self) -> str:
        """The tasks as a picture, for notebooks; a backward takes as long as a forward."""
        from mpmd.scheduling.render_svg import render_svg
        from mpmd.scheduling.simulate import simulate  # both import this module

        return render_svg(simulate(self))

    @property
    def num_stages(self) -> int:
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
        for order in self.orders:
            yield from order

    def placement_of(self, microbatch: int) -> Placement:
        """The mesh of each stage, as this microbatch sees it."""
        if self.mirror is not None and microbatch >= self.mirror.first_microbatch:
            return self.mirror.stage_to_mesh
        return self.stage_to_mesh

    def mesh_of(self, task: Task) -> int:
        return self.placement_of(task.microbatch)[task.stage]

    @functools.cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((t.stage, t.microbatch) for t in self.tasks() if t.phase in (Phase.I, Phase.W))

    def backward_phases(self, stage: int, microbatch: int) -> tuple[Phase, ...]:
        """``(B,)``, ``(I, W)``, or nothing without backward."""
        if not self.has_backward or stage in self.frozen:
            return ()
        return (Phase.I, Phase.W) if (stage, microbatch) in self._split else (Phase.B,)

    @functools.cached_property
    def flow(self) -> Sources:
        """The sources of all stages, in a chain too."""
        return chain_sources(self.num_stages) if self.sources is None else self.sources

    @functools.cached_property
    def readers(self) -> Sources:
        """For each stage those that read its values."""
        return readers_of(self.flow)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """The tasks whose results a task needs.

        ``F(s)`` needs the ``F`` of its sources, in a chain ``F(s-1)``; ``B(s)`` and ``I(s)`` need ``F(s)``
        and the ``B`` or ``I`` of its readers; ``W(s)`` needs ``I(s)``; all on the same microbatch.
        """
        stage, microbatch = task.stage, task.microbatch
        if task.phase is Phase.F:
            return tuple(Task(source, microbatch, Phase.F) for source in self.flow[stage])
        if task.phase is Phase.W:
            return (Task(stage, microbatch, Phase.I),)
        needed = [Task(stage, microbatch, Phase.F)]
        for reader in self.readers[stage]:
            needed += (Task(reader, microbatch, p) for p in self.backward_phases(reader, microbatch)[:1])
        return tuple(needed)

    def without_backward(self, stages: Collection[int]) -> ScheduleTable:
        """The same order without the backward of these stages, whose values need no gradient.

        Requires: no source of such a stage keeps its backward.
        """
        frozen = self.frozen | set(stages)
        orders = tuple(
            tuple(task for task in order if task.phase is Phase.F or task.stage not in frozen)
            for order in self.orders
        )
        return dataclasses.replace(self, orders=orders, frozen=frozen)

    def with_whole_backward(self, stages: Collection[int], late: Collection[int] = ()) -> ScheduleTable:
        """The same order with ``I`` and ``W`` of these stages joined at the position of ``I``.

        For stages whose backward cannot be split, such as a first stage whose input needs no gradient.
        Nothing but ``W`` moves, and nothing waits for a ``W``, so a legal table stays legal.

        Args:
            stages: those whose backward is whole.
            late: those of them whose backward is at the position of ``W``: only stages whose input gradient
                no stage waits for.
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
        return dataclasses.replace(self, orders=orders, splits_backward=splits)

    def as_csv(self) -> str:
        """One line per mesh, tasks separated by commas: ``0F0,0F1,0B0,0B1``."""
        return "".join(",".join(map(str, order)) + "\n" for order in self.orders)
