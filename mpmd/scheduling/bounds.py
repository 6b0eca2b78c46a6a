"""How short a step can be at best: lower bounds that hold for every order of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.workload import BACKWARD, FORWARD, WEIGHTS, Workload


@dataclass(frozen=True)
class Paths:
    """Seconds one microbatch needs without waiting, per lane.

    Attributes:
        head: before the lane's forward can start.
        tail: after the lane's backward, to the end of the step: backwards of earlier lanes, then what the
            first lane has left to do.
        life: from the start of the lane's forward to the end of its backward.
    """

    head: tuple[float, ...]
    tail: tuple[float, ...]
    life: tuple[float, ...]


def paths(workload: Workload) -> Paths:
    """The unavoidable seconds of one microbatch around each lane."""
    seconds, delays = workload.seconds, workload.delays
    head = [0.0] * len(workload.lanes)
    tail = [0.0] * len(workload.lanes)
    life = [0.0] * len(workload.lanes)
    for index, lane in enumerate(workload.lanes):  # lanes of one direction follow each other
        previous = lane.previous
        if previous is None:
            tail[index] = seconds[index][WEIGHTS]
        else:
            head[index] = head[previous] + seconds[previous][FORWARD] + delays[index][FORWARD]
            back = delays[previous][BACKWARD] + seconds[previous][BACKWARD] + tail[previous]
            tail[index] = max(seconds[index][WEIGHTS], back)
    for index in reversed(range(len(workload.lanes))):
        following = workload.lanes[index].following
        there_and_back = 0.0
        if following is not None:
            there_and_back = delays[following][FORWARD] + life[following] + delays[index][BACKWARD]
        life[index] = seconds[index][FORWARD] + there_and_back + seconds[index][BACKWARD]
    return Paths(tuple(head), tuple(tail), tuple(life))


def lower_bound(workload: Workload, limits: Sequence[int] | None = None) -> float:
    """Seconds that no order of this workload can beat.

    The largest, over meshes, of: what comes before its first forward, all its work, and what must follow;
    the same without weight gradients, which others need not wait for; one microbatch there and back; and,
    where memory is limited, the time the mesh's activations are held over what it may hold at once.

    Args:
        workload: lanes with their costs.
        limits: per mesh, the most it may hold; None: anything.
    """
    way = paths(workload)
    best = 0.0
    for mesh in range(workload.num_meshes):
        lanes = workload.lanes_on(mesh)
        if not lanes:
            continue
        head = min(way.head[lane] for lane in lanes)
        tail = min(way.tail[lane] for lane in lanes)
        work = workload.work_s(mesh)
        weights = sum(workload.seconds[k][WEIGHTS] * len(workload.lanes[k].microbatches) for k in lanes)
        best = max(best, head + work, head + work - weights + tail)
        best = max(best, *(way.head[k] + way.life[k] + way.tail[k] for k in lanes))
        if limits is not None and limits[mesh] > 0:
            held = sum(
                (way.life[k] + workload.seconds[k][WEIGHTS])
                * workload.sizes[k]
                * len(workload.lanes[k].microbatches)
                for k in lanes
            )
            best = max(best, head + held / limits[mesh])
    return best
