"""Dispatch of a program: on the thread that issues it or another one, and the number of its threads.

All decisions use estimates, for no particular machine: an order of magnitude is enough, and the same
program is dispatched the same everywhere.  Results never depend on it.

Dispatching a program to another thread costs two wake-ups, and while it waits the issuing thread is free for
other meshes.  A program that is as short as that is run where it is issued; a longer one as well if there is
no other mesh that could work meanwhile.  Measurements: docs/decisions/who-runs-what.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpmd.compile.thunks.thunk import (
    ConditionalThunk,
    CopyThunk,
    KernelThunk,
    MatmulThunk,
    Thunk,
    WhileThunk,
)
from mpmd.cost.device import HOST

_RATES = HOST.dispatch
_LANES = HOST.vector_bytes // 4


def seconds(costs: Mapping[str, float]) -> float:
    """Estimated seconds of a program on one thread.

    Args:
        costs: its `flops`, `transcendentals` and `bytes accessed`.
    """
    flops = costs["flops"] + _RATES.transcendental_flops * costs["transcendentals"]
    return flops / _RATES.flops + costs["bytes accessed"] / _RATES.cache_bytes


def threads_for(costs: Mapping[str, float], available: int) -> int:
    """The number of threads of a program, of so many available."""
    return max(1, available) if seconds(costs) > _RATES.wake_seconds else 1


def is_dispatched(costs: Mapping[str, float], meshes: int) -> bool:
    """Whether a program is dispatched to another thread than the one that issues it.

    Args:
        costs: of the program.
        meshes: the number of meshes in this process.
    """
    least = _RATES.dispatch_seconds if meshes > 1 else _RATES.dispatch_alone_seconds
    return seconds(costs) > least


def is_small(thunk: Thunk) -> bool:
    """Whether a thunk, and everything inside of it, is too short for a second thread.

    To divide it saves less than the barrier costs, and the next one finds its operands in the cache of the
    same core.
    """
    if isinstance(thunk, KernelThunk):
        *outer, last = thunk.plan.extents or (1,)
        points = math.prod(outer) * -(-last // _LANES) * _LANES
        return points * len(thunk.plan.nodes) <= _RATES.small_operations
    if isinstance(thunk, MatmulThunk):
        plan = thunk.plan
        return 2 * plan.m * plan.n * plan.k * math.prod(plan.batch) <= _RATES.small_flops
    if isinstance(thunk, CopyThunk):
        return thunk.source.size <= _RATES.small_operations
    if isinstance(thunk, WhileThunk):
        return all(is_small(inner) for inner in (*thunk.condition, *thunk.body))
    if isinstance(thunk, ConditionalThunk):
        return all(is_small(inner) for branch in thunk.branches for inner in branch)
    return False
