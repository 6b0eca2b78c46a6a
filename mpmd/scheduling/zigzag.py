"""The family of 1F1B: forwards to warm up, then a forward and a backward in turn, then the backwards left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmd.scheduling.list_schedule import Ordered, backward_first, fill_weights, in_order, list_schedule
from mpmd.scheduling.workload import BACKWARD, FORWARD, Step, Workload


def zigzag(
    workload: Workload, warm_up: Callable[[int, int], int], group: int | None = None
) -> list[list[Step]]:
    """Forwards and backwards per mesh, in the order of Megatron's interleaved schedule.

    Microbatches go in groups.  A mesh with several lanes runs a group through its first lane, then through
    its second, and so on; backwards likewise from the last lane to the first.

    Args:
        workload: what to order.
        warm_up: forwards before the first backward, given the place of the mesh in the pipeline and its
            lanes.
        group: microbatches per group; by default one per mesh that has lanes.
    """
    places = list(dict.fromkeys(lane.mesh for lane in workload.lanes))
    size = group or len(places)
    orders: list[list[Step]] = [[] for _ in range(workload.num_meshes)]
    for place, mesh in enumerate(places):
        lanes = workload.lanes_on(mesh)
        forwards: list[Step] = []
        backwards: list[Step] = []
        microbatches = workload.lanes[lanes[0]].microbatches
        for start in range(0, len(microbatches), size):
            together = microbatches[start : start + size]
            forwards += ((FORWARD, lane, m) for lane in lanes for m in together)
            backwards += ((BACKWARD, lane, m) for lane in reversed(lanes) for m in together)
        ahead = min(len(forwards), warm_up(place, len(lanes)))
        order = forwards[:ahead]
        for turn, backward in enumerate(backwards):
            order += forwards[ahead + turn : ahead + turn + 1]
            order.append(backward)
        orders[mesh] = order
    return orders


def most_held(workload: Workload, orders: Sequence[Sequence[Step]]) -> list[int]:
    """Per mesh, the most it holds if every backward releases at once; at least one microbatch."""
    peaks = []
    for mesh, order in enumerate(orders):
        held = 0
        peak = sum(workload.sizes[lane] for lane in workload.lanes_on(mesh))
        for kind, lane, _ in order:
            held += workload.sizes[lane] if kind == FORWARD else -workload.sizes[lane]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def best_order(
    workload: Workload, patterns: Sequence[Sequence[Sequence[Step]]], limits: Sequence[int] | None = None
) -> Ordered:
    """The fastest of some patterns, and of list scheduling where no pattern runs to its end.

    Patterns made for whole groups may deadlock where numbers do not divide; list scheduling does not.

    Args:
        workload: what to order.
        patterns: forwards and backwards per mesh.
        limits: per mesh, the most it may hold; by default what the pattern holds.
    """
    found: list[Ordered] = []
    for pattern in patterns:
        allowed = most_held(workload, pattern) if limits is None else limits
        result = fill_weights(workload, pattern, allowed) if workload.splits else in_order(workload, pattern)
        if result is not None:
            found.append(result)
        free = list_schedule(workload, allowed, backward_first)
        if result is None or free.makespan_s < result.makespan_s:
            found.append(free)
    return min(found, key=lambda ordered: ordered.makespan_s)
