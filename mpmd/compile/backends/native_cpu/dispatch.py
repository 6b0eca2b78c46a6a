"""Who runs a program: the thread that issues it or another one, and how many threads together.

All of it is decided from estimates, for no particular machine: an order of magnitude is needed, and the same
program is the same everywhere.  Results never depend on it.

Handing a program to another thread costs two wake-ups of threads that sleep, 30 to 80 µs of CPU time on two
cores, and while it waits the issuing thread is free for other meshes.  A program that is as short as that is
run where it is issued; a longer one as well if there is no other mesh that could work meanwhile.
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

_FLOPS = 1e11  # per second and thread, and transcendental functions as so many of them
_TRANSCENDENTAL_FLOPS = 10
_BYTES = 4e10  # per second and thread, from the caches that are shared

# A thunk up to here takes less than a microsecond: to divide it saves less than to wait for all threads costs
# where they do not come at once, and the next one finds what it needs in the cache of the same core.
_SMALL_OPERATIONS = 1 << 14  # operations on elements, and bytes of a copy
_SMALL_FLOPS = 1 << 15
_LANES = 16

# Seconds of work on one thread
_WORTH_THREADS = 1e-4  # from where waking others costs less than they bring
_WORTH_HANDING_OVER = 5e-5
_WORTH_HANDING_OVER_ALONE = 1e-3  # from where it costs less than a twentieth


def seconds(costs: Mapping[str, float]) -> float:
    """About how long a program takes on one thread.

    Args:
        costs: its `flops`, `transcendentals` and `bytes accessed`.
    """
    flops = costs["flops"] + _TRANSCENDENTAL_FLOPS * costs["transcendentals"]
    return flops / _FLOPS + costs["bytes accessed"] / _BYTES


def threads_for(costs: Mapping[str, float], available: int) -> int:
    """How many threads run a program, of so many that could."""
    return max(1, available) if seconds(costs) > _WORTH_THREADS else 1


def is_handed_over(costs: Mapping[str, float], meshes: int) -> bool:
    """Whether another thread than the one that issues a program runs it.

    Args:
        costs: of the program.
        meshes: how many meshes this process works for.
    """
    worth = _WORTH_HANDING_OVER if meshes > 1 else _WORTH_HANDING_OVER_ALONE
    return seconds(costs) > worth


def is_small(thunk: Thunk) -> bool:
    """Whether a thunk, and everything inside of it, is worth no second thread."""
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
