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

_FLOPS = 1e11  # per second and thread, and the weight of transcendental functions
_TRANSCENDENTAL_FLOPS = 10
_BYTES = 4e10  # per second and thread, from the shared caches

# A thunk up to here takes less than a microsecond: to divide it saves less than the barrier costs, and the
# next one finds its operands in the cache of the same core.
_SMALL_OPERATIONS = 1 << 14  # operations on elements, and bytes of a copy
_SMALL_FLOPS = 1 << 15
_LANES = 16

# Seconds of work on one thread
_WORTH_THREADS = 1e-4  # from where waking others costs less than it saves
_WORTH_HANDING_OVER = 5e-5
_WORTH_HANDING_OVER_ALONE = 1e-3  # from where it costs less than a twentieth


def seconds(costs: Mapping[str, float]) -> float:
    """Estimated seconds of a program on one thread.

    Args:
        costs: its `flops`, `transcendentals` and `bytes accessed`.
    """
    flops = costs["flops"] + _TRANSCENDENTAL_FLOPS * costs["transcendentals"]
    return flops / _FLOPS + costs["bytes accessed"] / _BYTES


def threads_for(costs: Mapping[str, float], available: int) -> int:
    """The number of threads of a program, of so many available."""
    return max(1, available) if seconds(costs) > _WORTH_THREADS else 1


def is_dispatched(costs: Mapping[str, float], meshes: int) -> bool:
    """Whether a program is dispatched to another thread than the one that issues it.

    Args:
        costs: of the program.
        meshes: the number of meshes in this process.
    """
    worth = _WORTH_HANDING_OVER if meshes > 1 else _WORTH_HANDING_OVER_ALONE
    return seconds(costs) > worth


def is_small(thunk: Thunk) -> bool:
    """Whether a thunk, and everything inside of it, is too short for a second thread."""
    if isinstance(thunk, KernelThunk):
        *outer, last = thunk.plan.extents or (1,)
        points = math.prod(outer) * -(-last // _LANES) * _LANES
        return points * len(thunk.plan.nodes) <= _SMALL_OPERATIONS
    if isinstance(thunk, MatmulThunk):
        plan = thunk.plan
        return 2 * plan.m * plan.n * plan.k * math.prod(plan.batch) <= _SMALL_FLOPS
    if isinstance(thunk, CopyThunk):
        return thunk.source.size <= _SMALL_OPERATIONS
    if isinstance(thunk, WhileThunk):
        return all(is_small(inner) for inner in (*thunk.condition, *thunk.body))
    if isinstance(thunk, ConditionalThunk):
        return all(is_small(inner) for branch in thunk.branches for inner in branch)
    return False
