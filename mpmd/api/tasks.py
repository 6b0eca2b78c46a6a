"""The order of tasks on each mesh, by the schedule that the user chose."""

from __future__ import annotations

from mpmd import ir
from mpmd.api.config import Config
from mpmd.runtime.entry import phase
from mpmd.scheduling.schedule import get_schedule


def task_orders(module: ir.Module, config: Config) -> str:
    """For each mesh its tasks in the order of the schedule: `"m1:0F0,0F1,0B0;m2:1F0,1B0"`.

    A stage without a number has that of its mesh among the meshes that are stages.  A program without
    microbatches has no tasks and keeps the order of its data flow.

    Raises:
        ScheduleError: the schedule is unknown or cannot order these stages.
    """
    schedule = get_schedule(config.schedule)
    main = next(f for f in ir.funcs(module) if f.is_entry)
    meshes = main.topology.schedulable
    found: dict[int, str] = {}
    present: set[tuple[int, int, str]] = set()
    for fragment in ir.fragments(main):
        if fragment.is_user and fragment.call_counter is not None and fragment.mesh in meshes:
            stage = fragment.stage if fragment.stage is not None else meshes.index(fragment.mesh)
            found[stage] = fragment.mesh
            present.add((stage, fragment.call_counter, phase(fragment)))
    if not present:
        return ""
    stages = sorted(found)
    used = [m for m in meshes if m in found.values()]
    table = schedule.table(
        num_stages=len(stages),
        num_meshes=len(used),
        num_microbatches=1 + max(microbatch for _, microbatch, _ in present),
        stage_to_mesh=[used.index(found[stage]) for stage in stages],
    )
    orders = []
    for mesh, order in zip(used, table.orders):
        tasks = [(stages[t.stage], t.microbatch, t.phase.value) for t in order]
        named = ",".join(f"{stage}{letter}{number}" for stage, number, letter in tasks
                         if (stage, number, letter) in present)  # fmt: skip
        orders.append(f"{mesh}:{named}")
    return ";".join(orders)
