"""The order of tasks on each mesh, by the schedule that the user chose.

Microbatches in the data flow of a step: their loops, and their way over the meshes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from mpmd import ir
from mpmd.config.config import Config
from mpmd.errors import ScheduleError
from mpmd.passes.calls.carried_sums import SUFFIX
from mpmd.runtime.program.graph import phase
from mpmd.scheduling.catalogue import PipelineSchedule, ScheduleTable, get_schedule
from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.simulate import simulate
from mpmd.scheduling.table import Phase, Sources, Task, TaskOrders, branching
from mpmd.support import diagnostics
from mpmd.support.option_texts import NamePlacement


@dataclasses.dataclass(frozen=True)
class TaskFragment:
    """A fragment that does one microbatch's forward or backward work on a mesh.

    Attributes:
        position: among the ops of the entry function.
        mesh: where it runs.
        stage: its pipeline stage, if the user gave one.
        microbatch: its call counter.
        phase: of the task.
    """

    position: int
    mesh: str
    stage: int | None
    microbatch: int
    phase: Phase

    @property
    def is_backward(self) -> bool:
        """Whether it is backward work, whole or half."""
        return self.phase.is_backward


def task_fragments(main: ir.Func) -> list[TaskFragment]:
    """The named fragments of microbatches on meshes that are stages, in program order."""
    meshes = main.topology.schedulable
    return [
        TaskFragment(i, op.mesh, op.stage, op.call_counter, Phase(phase(op)))
        for i, op in enumerate(ir.ops(main))
        if isinstance(op, ir.Fragment) and op.is_user and op.call_counter is not None and op.mesh in meshes
    ]


def rounds_of(main: ir.Func, fragments: Collection[TaskFragment]) -> list[list[int]]:
    """The microbatches in groups; each needs the backward work of groups before it.

    Microbatches of one loop over a batch are one group.  Those of a second loop that uses the gradients of
    the first, such as an evaluation of new parameters, are another.
    """
    at = {fragment.position: fragment for fragment in fragments}
    round_of: dict[int, int] = {}
    level: dict[ir.Value, int] = {}  # even if the last work on the way was forward, odd after backward work
    for position, op in enumerate(ir.ops(main)):
        reached = max((level.get(v, 0) for v in op.operands), default=0)
        fragment = at.get(position)
        if fragment is not None:
            reached += reached % 2 != fragment.is_backward
            round_of[fragment.microbatch] = max(round_of.get(fragment.microbatch, 0), reached // 2)
        if reached:
            level.update(dict.fromkeys(op.results, reached))
    groups: dict[int, list[int]] = {}
    for microbatch in sorted(round_of):
        groups.setdefault(round_of[microbatch], []).append(microbatch)
    return [groups[number] for number in sorted(groups)]


def mirrored_rounds(main: ir.Func, fragments: Collection[TaskFragment]) -> list[list[int | None]]:
    """The microbatches in groups; each has second copies of stages in its second half.

    Each loop over a batch has copies of its own and numbers of its own in a row, and is a group; a loop with
    one microbatch has no copies.  None takes the place of a microbatch of the first half that computes
    nothing, as nothing uses its results: the second half's stay there.
    """
    ops = ir.ops(main)
    copied = {
        fragment.microbatch
        for fragment in fragments
        if any(origin.name.endswith(SUFFIX) for origin in ops[fragment.position].origins)
    }
    groups: list[list[int | None]] = []
    first: list[int] = []
    microbatches = sorted({fragment.microbatch for fragment in fragments})
    for are_copied, run in itertools.groupby(microbatches, copied.__contains__):
        if not are_copied:
            first = list(run)
            continue
        second = list(run)
        own = max(0, len(first) - len(second) - 1)
        groups.extend([microbatch] for microbatch in first[:own])
        lost: list[int | None] = [None] * (len(second) - len(first))
        groups.append([*lost, *first[own:], *second])
        first = []
    groups.extend([microbatch] for microbatch in first)
    return groups


def depths_of(main: ir.Func, fragments: Collection[TaskFragment]) -> dict[TaskFragment, int]:
    """How often a microbatch changes meshes, on its longest way to each of its fragments.

    Args:
        main: the entry function.
        fragments: all forward or all backward fragments of one microbatch.
    """
    at = {fragment.position: fragment for fragment in fragments}
    depth_of: dict[TaskFragment, int] = {}
    reached: dict[ir.Value, dict[str, int]] = {}  # last visited mesh -> depth there
    for position, op in enumerate(ir.ops(main)):
        before: dict[str, int] = {}
        for value in op.operands:
            for mesh, depth in reached.get(value, {}).items():
                before[mesh] = max(before.get(mesh, 0), depth)
        fragment = at.get(position)
        if fragment is not None:
            depth_of[fragment] = max((d + (mesh != fragment.mesh) for mesh, d in before.items()), default=0)
            before = {fragment.mesh: depth_of[fragment]}
        if before:
            reached.update(dict.fromkeys(op.results, before))
    return depth_of


# The replacement of a schedule that visits every mesh once, where microbatches visit meshes several times.
_FOR_SEVERAL_VISITS = {"1f1b": "interleaved_1f1b", "eager_1f1b": "interleaved_1f1b"}

# Phases of fragments that a task of a table may order: a backward pass may be whole or in halves.
_STAND_FOR = {
    Phase.F: (Phase.F,),
    Phase.B: (Phase.B, Phase.I, Phase.W),
    Phase.I: (Phase.I, Phase.B),
    Phase.W: (Phase.W,),
}


def task_orders(module: ir.Module, config: Config) -> TaskOrders:
    """For each mesh its tasks in the order of the schedule.

    Loops over microbatches, one waiting for another, are scheduled each by itself, and so are all
    loops if the schedule has two copies of the stages.  Stages without a number follow each other as the
    data flow does; each has the number of its mesh, or of a visit where a microbatch comes to a mesh several
    times.  A program without microbatches has no tasks and keeps the order of its data flow.

    Raises:
        ScheduleError: the schedule is unknown or cannot order these stages.
    """
    schedule = config.pipeline_schedule
    main = next(f for f in ir.funcs(module) if f.is_entry)
    orders: dict[str, list[Task]] = {}
    pairs: list[tuple[Task, Task]] = []
    fragments = task_fragments(main)
    first_copies = _first_copies(config) if mirrored_places(config) else {}
    if config.schedule is not None:
        _check_phases(schedule, fragments)
    of_loops = mirrored_rounds if first_copies else rounds_of
    for microbatches in of_loops(main, fragments):
        of_round = _of_microbatches(fragments, microbatches)
        if _number_remaining(main, of_round, config):
            of_round = _of_microbatches(task_fragments(main), microbatches)
        if _learns_within(main, of_round):
            continue
        chosen = schedule
        if any(fragment.stage is None for fragment in of_round) and _number_visits(main, of_round):
            of_round = _of_microbatches(task_fragments(main), microbatches)
            chosen = _for_several_visits(schedule, main)
        of_mesh, combined = _round_orders(main, of_round, microbatches, chosen, first_copies)
        for mesh, tasks in of_mesh.items():
            orders.setdefault(mesh, []).extend(tasks)
        pairs += combined
    return TaskOrders(tuple((mesh, tuple(tasks)) for mesh, tasks in orders.items()), tuple(pairs))


def _learns_within(main: ir.Func, fragments: Collection[TaskFragment]) -> bool:
    """Whether a microbatch's forward needs its own backward, as an iteration with several updates does.

    Its parts follow each other, so that no schedule can order them.
    """
    at = {fragment.position: fragment for fragment in fragments}
    behind: dict[ir.Value, int] = {}  # the last microbatch whose backward work a value needs
    for position, op in enumerate(ir.ops(main)):
        needed = max((behind.get(v, -1) for v in op.operands), default=-1)
        fragment = at.get(position)
        if fragment is not None and fragment.is_backward:
            needed = max(needed, fragment.microbatch)
        elif fragment is not None and fragment.microbatch <= needed:
            return True
        if needed >= 0:
            behind.update(dict.fromkeys(op.results, needed))
    return False


def _check_phases(schedule: PipelineSchedule, fragments: Sequence[TaskFragment]) -> None:
    """Compares the tasks that a schedule orders with the step's.

    Raises:
        ScheduleError: the step has a backward pass, and the schedule does not order it.
    """
    if not fragments:
        diagnostics.warning(
            f"schedule {schedule.name!r} has nothing to order: no named computation is in a loop over "
            "microbatches, and fragments run in the order of the data flow\n"
            f"  split the batch by mpmd.accumulate_gradients or mpmd.microbatch_loop, or give no schedule"
        )
    elif not schedule.has_backward and any(fragment.is_backward for fragment in fragments):
        raise ScheduleError(
            f"schedule {schedule.name!r} orders no backward, but the step has one\n"
            "  use a schedule for training, such as 1f1b"
        )
    elif schedule.splits_backward and not any(fragment.phase is Phase.I for fragment in fragments):
        diagnostics.warning(
            f"schedule {schedule.name!r} splits the backward of the stages, but this step has no backward "
            "to split into input gradients, for which another mesh waits, and weight gradients\n"
            "  use 1f1b"
        )


def _of_microbatches(
    fragments: Sequence[TaskFragment], microbatches: Sequence[int | None]
) -> list[TaskFragment]:
    return [fragment for fragment in fragments if fragment.microbatch in set(microbatches)]


def mirrored_places(config: Config) -> dict[str, NamePlacement]:
    """Where the second copies of the named stages go, if the schedule keeps two of each; else nothing.

    All names of a stage go together.
    """
    stages = _stages(config)
    first = _first_copies(config)
    numbers = list(first)
    used = [mesh for mesh in config.topology if mesh in first.values()]
    shape = PipelineShape(len(used), 2, tuple(used.index(first[number]) for number in numbers))
    try:
        mirror = config.pipeline_schedule.mirror(shape)
    except ScheduleError as error:
        names = {number: [name for name in stages if stages[name] == number] for number in numbers}
        raise ScheduleError(f"{error}\n{_legend(first, names, used)}") from error
    if mirror is None:
        return {}
    opposite = {number: used[mesh] for number, mesh in zip(numbers, mirror.stage_to_mesh)}
    return {
        name: dataclasses.replace(place, mesh=opposite[stages[name]], stage=stages[name])
        for name, place in config.assignment.items()
    }


def numbered(config: Config) -> dict[str, NamePlacement]:
    stages = _stages(config)
    return {name: dataclasses.replace(place, stage=stages[name]) for name, place in config.assignment.items()}


def _stages(config: Config) -> dict[str, int]:
    """The stage of every name: its own, or its mesh's."""
    of_mesh = _stages_of_meshes(config)
    return {
        name: of_mesh[place.mesh] if place.stage is None else place.stage
        for name, place in config.assignment.items()
    }


def _stages_of_meshes(config: Config) -> dict[str, int]:
    """The stage of the names on each mesh that have no number of their own.

    It is the position of the mesh, unless that is the number of a stage on another mesh: then the first stage
    of the mesh, or a number that is not in use.
    """
    meshes = list(config.topology)
    mesh_of = {place.stage: place.mesh for place in config.assignment.values() if place.stage is not None}
    stage_of = {}
    free = itertools.count(max([len(meshes) - 1, *mesh_of]) + 1)
    for position, mesh in enumerate(meshes):
        own = sorted(stage for stage, other in mesh_of.items() if other == mesh)
        if mesh_of.get(position, mesh) == mesh:
            stage_of[mesh] = position
        else:
            stage_of[mesh] = own[0] if own else next(free)
    return stage_of


def _first_copies(config: Config) -> dict[int, str]:
    """The mesh that each stage is assigned to, in order; it may have a second copy on another one."""
    stages = _stages(config)
    return dict(sorted((stages[name], place.mesh) for name, place in config.assignment.items()))


def _number_remaining(main: ir.Func, fragments: Sequence[TaskFragment], config: Config) -> bool:
    """Gives fragments without a stage their mesh's, if it is not the position of the mesh.

    Returns whether there were any; all other fragments without a stage belong to the position of their mesh.
    """
    ops, meshes, of_mesh = ir.ops(main), list(config.topology), _stages_of_meshes(config)
    changed = False
    for fragment in fragments:
        if fragment.stage is None and of_mesh[fragment.mesh] != meshes.index(fragment.mesh):
            ops[fragment.position].stage = of_mesh[fragment.mesh]
            changed = True
    return changed


def _round_orders(
    main: ir.Func,
    fragments: Sequence[TaskFragment],
    microbatches: Sequence[int | None],
    schedule: PipelineSchedule,
    first_copies: dict[int, str],
) -> tuple[dict[str, list[Task]], list[tuple[Task, Task]]]:
    """The tasks of one loop over microbatches, for each mesh that takes part, and those that are one program.

    Where the stages have second copies the table is for all stages, those that this loop does not use
    included, as the place of each second copy depends on all of them.
    """
    meshes = main.topology.schedulable
    staged = [_staged(fragment, meshes) for fragment in fragments]
    if first_copies:
        mesh_of = first_copies
    else:
        on = {fragment.stage: fragment.mesh for fragment in staged}
        mesh_of = {stage: on[stage] for stage in _in_pipeline_order(main, fragments, staged)}
    stages = list(mesh_of)
    used = [mesh for mesh in meshes if mesh in mesh_of.values()]
    sources = None if first_copies else _branches(main, fragments, staged, stages)
    try:
        table = schedule.table(
            num_stages=len(stages),
            num_meshes=len(used),
            num_microbatches=len(microbatches),
            stage_to_mesh=[used.index(mesh) for mesh in mesh_of.values()],
            sources=sources,
        )
    except ScheduleError as error:
        names = _names_by_stage(main, staged, SUFFIX if first_copies else "")
        raise ScheduleError(f"{error}\n{_legend(mesh_of, names, used)}") from error
    shape = PipelineShape(len(used), len(microbatches), table.stage_to_mesh, sources)
    for remark in schedule.remarks(shape):
        diagnostics.warning(remark, main.location)
    half = (len(microbatches) + 1) // 2
    if table.mirror is not None and table.mirror.first_microbatch != half:
        raise ScheduleError(
            f"schedule {schedule.name!r} uses the second copies of the stages from microbatch "
            f"{table.mirror.first_microbatch} on\n  expected: from {half} on, for half of them"
        )
    present = {(fragment.stage, fragment.microbatch, fragment.phase) for fragment in staged}
    split = {fragment.stage for fragment in staged if fragment.phase is Phase.I}
    trained = {fragment.stage for fragment in staged if fragment.is_backward}
    if trained and table.mirror is None:
        table = table.without_backward([n for n, stage in enumerate(stages) if stage not in trained])
    table = _with_whole_backward(table, [n for n, stage in enumerate(stages) if stage not in split])
    orders: dict[str, list[Task]] = {}
    for mesh, order in zip(used, table.orders):
        orders[mesh] = []
        for task in order:
            stage, number = stages[task.stage], microbatches[task.microbatch]
            if number is not None and any((stage, number, p) in present for p in _STAND_FOR[task.phase]):
                orders[mesh].append(Task(stage, number, task.phase))
    named = [
        tuple(Task(stages[t.stage], microbatches[t.microbatch] or 0, t.phase) for t in pair)
        for pair in table.pairs
    ]
    neighbours = {pair for tasks in orders.values() for pair in itertools.pairwise(tasks)}
    return orders, [(a, b) for a, b in named if (a, b) in neighbours]


def _names_by_stage(main: ir.Func, staged: Iterable[TaskFragment], suffix: str) -> dict[int, list[str]]:
    """The names in the fragments of each stage, without the suffix of second copies."""
    ops = ir.ops(main)
    names_of: dict[int, list[str]] = {}
    for fragment in staged:
        assert fragment.stage is not None
        names = names_of.setdefault(fragment.stage, [])
        names += [origin.name.removesuffix(suffix) for origin in ops[fragment.position].origins]
    return {stage: list(dict.fromkeys(names)) for stage, names in names_of.items()}


def _legend(mesh_of: Mapping[int, str], names: Mapping[int, Sequence[str]], used: Sequence[str]) -> str:
    """The names and the mesh of each stage, a line each, with the numbers that a schedule has for them."""
    lines = []
    for number, (stage, mesh) in enumerate(mesh_of.items()):
        called = ", ".join(names[stage]) if stage in names else "not in this loop,"
        lines.append(f"  stage {number} is {called} on mesh {used.index(mesh)}, {mesh!r}")
    return "\n".join(lines)


def _with_whole_backward(table: ScheduleTable, stages: Sequence[int]) -> ScheduleTable:
    """The table for a program in which the backward of these stages is whole.

    No stage waits for the backward of the first stage, of a tower, or behind frozen ones: it takes the
    position of the second half of the table's backward, if the step is shorter so.
    """
    if not table.splits_backward:
        return table
    early = table.with_whole_backward(stages)
    first = [n for n in stages if table.frozen.issuperset(table.flow[n])]
    if not first:
        return early
    late = table.with_whole_backward(stages, late=first)
    return min((early, late), key=lambda t: simulate(t).makespan_s)


def _staged(fragment: TaskFragment, meshes: Sequence[str]) -> TaskFragment:
    """The fragment with a stage: its own, or the position of its mesh."""
    if fragment.stage is not None:
        return fragment
    return dataclasses.replace(fragment, stage=meshes.index(fragment.mesh))


def _in_pipeline_order(
    main: ir.Func, fragments: Sequence[TaskFragment], staged: Sequence[TaskFragment]
) -> list[int]:
    """The stages as a microbatch comes to them; by their numbers where the user gave some."""
    stages = sorted({fragment.stage for fragment in staged if fragment.stage is not None})
    if any(fragment.stage is not None for fragment in fragments):
        return stages
    longest = _longest_way(fragments)
    sign = -1 if longest[0].is_backward else 1
    depth: dict[int, int] = {}
    for fragment, changes in depths_of(main, longest).items():
        stage = main.topology.schedulable.index(fragment.mesh)
        depth[stage] = max(depth.get(stage, changes), changes)
    return sorted(stages, key=lambda stage: (sign * depth.get(stage, 0), stage))


def _branches(
    main: ir.Func, fragments: Sequence[TaskFragment], staged: Sequence[TaskFragment], stages: Sequence[int]
) -> Sources | None:
    """For each stage those that its forward reads; None for a chain, and for numbers in another order.

    A value that goes through unnamed work is read by the stages after it.
    """
    number = {stage: n for n, stage in enumerate(stages)}
    longest = {fragment.position for fragment in _longest_way(fragments)}
    at = {f.position: number[f.stage] for f in staged if f.position in longest and f.stage is not None}
    sources: list[set[int]] = [set() for _ in stages]
    reached: dict[ir.Value, set[int]] = {}
    for position, op in enumerate(ir.ops(main)):
        before = set[int]().union(*(reached.get(value, ()) for value in op.operands))
        stage = at.get(position)
        if stage is not None:
            sources[stage] |= before - {stage}
            before = {stage}
        if before:
            reached.update(dict.fromkeys(op.results, before))
    if len(set(at.values())) < len(stages) or any(n > stage for stage, of in enumerate(sources) for n in of):
        return None
    return branching(sources)


def _longest_way(fragments: Sequence[TaskFragment]) -> list[TaskFragment]:
    """The forward fragments of the first microbatch that has the most; backward ones if there are no others.

    A microbatch has fewer than others where nothing uses what it would compute.
    """
    forward = [fragment for fragment in fragments if not fragment.is_backward] or fragments
    longest, _ = collections.Counter(fragment.microbatch for fragment in forward).most_common(1)[0]
    return [fragment for fragment in forward if fragment.microbatch == longest]


def _number_visits(main: ir.Func, fragments: Sequence[TaskFragment]) -> bool:
    """Gives fragments stages by visit, if a microbatch comes back to a mesh on its forward way.

    The backward way visits in the opposite order; where a way visits a mesh more often than the longest
    forward way, no stages are assigned.  Returns whether any were.
    """
    ops, meshes = ir.ops(main), main.topology.schedulable
    longest = depths_of(main, _longest_way(fragments))
    ways = sorted({(depth, meshes.index(fragment.mesh)) for fragment, depth in longest.items()})
    if len(ways) == len({mesh for _, mesh in ways}):
        return False
    visits = {m: [stage for stage, (_, mesh) in enumerate(ways) if mesh == m] for _, m in ways}
    stages: dict[int, int] = {}
    for microbatch in sorted({fragment.microbatch for fragment in fragments}):
        for phases in ((Phase.F,), (Phase.B, Phase.I), (Phase.W,)):
            some = [f for f in fragments if f.microbatch == microbatch and f.phase in phases]
            depths = depths_of(main, some)
            for m in {meshes.index(fragment.mesh) for fragment in some}:
                here = [fragment for fragment in some if meshes.index(fragment.mesh) == m]
                order = sorted({depths[fragment] for fragment in here})
                numbers = visits.get(m, []) if Phase.F in phases else visits.get(m, [])[::-1]
                if len(order) > len(numbers):
                    return False
                stages |= {fragment.position: numbers[order.index(depths[fragment])] for fragment in here}
    for position, stage in stages.items():
        ops[position].stage = stage
    return True


def _for_several_visits(schedule: PipelineSchedule, main: ir.Func) -> PipelineSchedule:
    """The schedule, or one like it that may visit a mesh several times."""
    other = _FOR_SEVERAL_VISITS.get(schedule.name)
    if other is None:
        return schedule
    diagnostics.warning(
        f"microbatches come to a mesh several times, which schedule {schedule.name!r} cannot order: "
        f"{other!r} is used instead",
        main.location,
    )
    return get_schedule(other)
