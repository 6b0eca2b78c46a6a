"""The family of 1F1B: warm-up forwards, then forwards and backwards in turn, then backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmd.scheduling.list_schedule import Ordered, backward_first, fill_weights, list_schedule
from mpmd.scheduling.workload import BACKWARD, FORWARD, Step, Workload


def zigzag(
    workload: Workload, warm_up: Callable[[int, int], int], group: int | None = None
) -> list[list[Step]]:
    """Forwards and backwards per mesh, in the order of Megatron's interleaved schedule.

    Microbatches go in groups.  A mesh with several chains runs a group through its first chain, then through
    its second, and so on; backwards likewise from the last chain to the first.

    Args:
        workload: the steps to order.
        warm_up: forwards before the first backward, given the position of the mesh in the pipeline and its
            chains.
        group: microbatches per group; by default one per mesh that has chains.
    """
    places = list(dict.fromkeys(chain.mesh for chain in workload.chains))
    size = group or len(places)
    orders: list[list[Step]] = [[] for _ in range(workload.num_meshes)]
    for place, mesh in enumerate(places):
        chains = workload.chains_on(mesh)
        forwards: list[Step] = []
        backwards: list[Step] = []
        microbatches = workload.chains[chains[0]].microbatches
        for start in range(0, len(microbatches), size):
            together = microbatches[start : start + size]
            forwards += ((FORWARD, chain, m) for chain in chains for m in together)
            backwards += ((BACKWARD, chain, m) for chain in reversed(chains) for m in together)
        ahead = min(len(forwards), warm_up(place, len(chains)))
        order = forwards[:ahead]
        for turn, backward in enumerate(backwards):
            order += forwards[ahead + turn : ahead + turn + 1]
            order.append(backward)
        orders[mesh] = order
    return orders


def most_held(workload: Workload, orders: Sequence[Sequence[Step]]) -> list[int]:
    """Per mesh, its maximum if every backward releases at once; at least one microbatch."""
    peaks = []
    for mesh, order in enumerate(orders):
        held = 0
        peak = sum(workload.sizes[chain] for chain in workload.chains_on(mesh))
        for kind, chain, _ in order:
            held += workload.sizes[chain] if kind == FORWARD else -workload.sizes[chain]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def best_order(
    workload: Workload, pattern: Sequence[Sequence[Step]], limits: Sequence[int] | None = None
) -> Ordered:
    """The faster of a pattern and of list scheduling.

    Patterns for whole groups may deadlock where numbers do not divide; list scheduling does not.

    Args:
        workload: the steps to order.
        pattern: forwards and backwards per mesh.
        limits: per mesh, its memory limit; by default the memory of the pattern.
    """
    allowed = most_held(workload, pattern) if limits is None else limits
    filled = fill_weights(workload, pattern, allowed)
    free = list_schedule(workload, allowed, backward_first)
    return free if filled is None or free.makespan_s < filled.makespan_s else filled
