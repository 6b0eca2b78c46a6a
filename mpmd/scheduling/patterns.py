"""Repeating patterns for V-shaped placements: each microbatch repeats the one before, six steps later.

With two chains per mesh and steps of equal length a mesh has six steps per microbatch.  A pattern gives the
time at which microbatch 0 passes each mesh on its four ways (forward down, forward up, backward down,
backward up) by the steps it takes from mesh to mesh on each way.  A mesh then holds the time between forward
and backward over six, so short ways hold little.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (the idea of the pattern and the
bounds); the offsets and the way they are filled are found by our own search.

The family of 1F1B: warm-up forwards, then forwards and backwards in turn, then backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpmd.scheduling.list_schedule import Ordered, backward_first, fill_weights, list_schedule
from mpmd.scheduling.workload import BACKWARD, FORWARD, Step, Workload

_PERIOD = 6


@dataclass(frozen=True)
class VPattern:
    """Steps per mesh on each way, and steps of rest at each turn.

    Attributes:
        ways: of forward down, forward up, backward down, backward up.
        rests: between the end of a way and the next one: at the far mesh, at the near mesh, at the far mesh.
    """

    ways: tuple[int, int, int, int]
    rests: tuple[int, int, int]

    def orders(self, num_meshes: int, num_microbatches: int) -> list[list[Step]] | None:
        """Forwards and backwards per mesh, by time; None if two ways would meet on a mesh."""
        down, up, back_down, back_up = self.ways
        far = num_meshes - 1
        second = (down + up) * far + 1 + self.rests[0]
        third = second + 1 + self.rests[1]
        fourth = third + (back_down + back_up) * far + 1 + self.rests[2]
        orders: list[list[Step]] = []
        for mesh in range(num_meshes):
            upper = 2 * num_meshes - 1 - mesh
            starts = {
                (FORWARD, mesh): down * mesh,
                (FORWARD, upper): second - up * mesh,
                (BACKWARD, upper): third + back_down * mesh,
                (BACKWARD, mesh): fourth - back_up * mesh,
            }
            if len({start % _PERIOD for start in starts.values()}) < len(starts):
                return None
            timed = sorted(
                (start + _PERIOD * microbatch, kind, chain, microbatch)
                for (kind, chain), start in starts.items()
                for microbatch in range(num_microbatches)
            )
            orders.append([(kind, chain, microbatch) for _, kind, chain, microbatch in timed])
        return orders


V_HALF_PATTERNS = (
    VPattern((1, 2, 1, 2), (0, 3, 1)),
    VPattern((1, 2, 2, 1), (3, 2, 3)),
    VPattern((1, 2, 2, 1), (3, 0, 3)),
)
V_MIN_PATTERNS = tuple(
    VPattern((1, 1, 1, 1), rests) for rests in ((0, 0, 0), (0, 4, 0), (0, 2, 0), (4, 0, 0))
)


def is_v_shaped(workload: Workload) -> bool:
    """One direction that goes down all meshes and up again."""
    meshes = [chain.mesh for chain in workload.chains]
    down = list(range(workload.num_meshes))
    return meshes == down + down[::-1]


_FILLS = ((0, False), (2, False), (2, True))
"""Lookahead, and whether weight gradients go first: each is the best for some number of meshes."""


def pattern_candidates(
    workload: Workload, patterns: Sequence[VPattern], limits: Sequence[int]
) -> list[Ordered]:
    """The patterns that fit the number of meshes, with weight gradients filled in under the limits."""
    filled_patterns = []
    for pattern in patterns:
        orders = pattern.orders(workload.num_meshes, len(workload.chains[0].microbatches))
        if orders is None:
            continue
        for lookahead, weights_first in _FILLS:
            filled = fill_weights(workload, orders, limits, lookahead, weights_first)
            if filled is not None:
                filled_patterns.append(filled)
    return filled_patterns


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
