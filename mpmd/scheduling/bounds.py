"""How short a step can be at best: lower bounds that hold for every order of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.workload import BACKWARD, FORWARD, WEIGHTS, Workload


@dataclass(frozen=True)
class Paths:
    """Seconds one microbatch needs without waiting, per chain.

    Attributes:
        head: before the chain's forward can start.
        tail: after the chain's backward, to the end of the step: backwards of earlier chains, then the
            remaining
        work of the first chain.
        life: from the start of the chain's forward to the end of its backward.
    """

    head: tuple[float, ...]
    tail: tuple[float, ...]
    life: tuple[float, ...]


def paths(workload: Workload) -> Paths:
    """The unavoidable seconds of one microbatch around each chain."""
    seconds, delays = workload.seconds, workload.delays
    head = [0.0] * len(workload.chains)
    tail = [0.0] * len(workload.chains)
    life = [0.0] * len(workload.chains)
    for index, chain in enumerate(workload.chains):  # chains of one direction follow each other
        previous = chain.previous
        if previous is None:
            tail[index] = seconds[index][WEIGHTS]
        else:
            head[index] = head[previous] + seconds[previous][FORWARD] + delays[index][FORWARD]
            back = delays[previous][BACKWARD] + seconds[previous][BACKWARD] + tail[previous]
            tail[index] = max(seconds[index][WEIGHTS], back)
    for index in reversed(range(len(workload.chains))):
        following = workload.chains[index].following
        there_and_back = 0.0
        if following is not None:
            there_and_back = delays[following][FORWARD] + life[following] + delays[index][BACKWARD]
        life[index] = seconds[index][FORWARD] + there_and_back + seconds[index][BACKWARD]
    return Paths(tuple(head), tuple(tail), tuple(life))


def lower_bound(workload: Workload, limits: Sequence[int] | None = None) -> float:
    """Seconds that no order of this workload can beat.

    The largest, over meshes, of: the work before its first forward, all its work, and the work that must
    follow; the same without weight gradients, for which no other mesh waits; one microbatch there and back;
    and, where memory is limited, the time the mesh's activations are held over the limit.

    Args:
        workload: chains with their costs.
        limits: per mesh, its memory limit; None: unlimited.
    """
    way = paths(workload)
    best = 0.0
    for mesh in range(workload.num_meshes):
        chains = workload.chains_on(mesh)
        if not chains:
            continue
        head = min(way.head[chain] for chain in chains)
        tail = min(way.tail[chain] for chain in chains)
        work = workload.work_s(mesh)
        weights = sum(workload.seconds[k][WEIGHTS] * len(workload.chains[k].microbatches) for k in chains)
        best = max(best, head + work, head + work - weights + tail)
        best = max(best, *(way.head[k] + way.life[k] + way.tail[k] for k in chains))
        if limits is not None and limits[mesh] > 0:
            held = sum(
                (way.life[k] + workload.seconds[k][WEIGHTS])
                * workload.sizes[k]
                * len(workload.chains[k].microbatches)
                for k in chains
            )
            best = max(best, head + held / limits[mesh])
    return best
