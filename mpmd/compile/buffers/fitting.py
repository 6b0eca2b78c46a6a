"""Fits temporaries into the remaining memory by rematerialisation."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.buffers.buffer_report import peak_holders
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule
from mpmd.compile.hlo.attributes import InputOutputAlias
from mpmd.compile.schedule.heap import peak_of
from mpmd.compile.schedule.rematerialization import Rematerialization
from mpmd.support import diagnostics
from mpmd.support.diagnostics import Severity

_ROUNDS = 5

log = logging.getLogger("mpmd.compile")


def left_for_temporaries(fragment: FragmentModule, assignment: BufferAssignment, memory_bytes: int) -> int:
    """Bytes of a device that neither the fragment's parameters and results nor other values take.

    Args:
        fragment: has the bytes of other values: `reserved_hbm_bytes` of the exported program.
        assignment: its parameters and results; those that share memory count once.
        memory_bytes: memory of the device.
    """
    shared = {a.output_index[0] if a.output_index else 0 for a in _aliases(assignment)}
    taken = sum(
        a.size
        for a in assignment.allocations
        if a.kind in ("parameter", "constant") or (a.kind == "result" and a.index not in shared)
    )
    return memory_bytes - fragment.reserved_bytes - taken


def fit(
    module: HloModule,
    fragment: FragmentModule,
    memory_bytes: int,
    assign: Callable[[], BufferAssignment],
) -> BufferAssignment:
    """Buffers of a module that fit into the remaining memory of a device, as far as possible.

    Logs which values were computed again, and warns if the module does not fit.

    Args:
        module: scheduled; values are computed again in it.
        fragment: its source.
        memory_bytes: memory of the device.
        assign: assigns buffers to the current module.
    """
    assignment = assign()
    left = left_for_temporaries(fragment, assignment, memory_bytes)
    for _ in range(_ROUNDS):
        if assignment.arena_bytes <= left or left <= 0:
            break
        # the simulated heap is less exact than the assignment: scale its limit by the difference
        limit = max(1, peak_of(module) * left // assignment.arena_bytes)
        with diagnostics.collecting() as notices:
            changed = Rematerialization(limit=limit).run(module)
        for notice in notices.of(Severity.NOTICE):
            log.info("fragment %s: %s", fragment.name, notice.message)
        if not changed:
            break
        assignment = assign()
    if assignment.arena_bytes > left:
        _warn(fragment, assignment, memory_bytes, left)
    return assignment


def _warn(fragment: FragmentModule, assignment: BufferAssignment, memory_bytes: int, left: int) -> None:
    held = ", ".join(f"{label} ({size:,})" for label, size in peak_holders(assignment)[:4])
    warnings.warn(
        f"fragment {fragment.name} on {fragment.mesh} needs {assignment.arena_bytes:,} bytes of temporaries, "
        f"and {max(0, left):,} are left\n"
        f"  the device has {memory_bytes:,} bytes; {fragment.reserved_bytes:,} belong to values that live "
        f"meanwhile, {memory_bytes - fragment.reserved_bytes - left:,} to its arguments and results\n"
        f"  most is held by {held or 'nothing: it has no temporaries'}\n"
        "  use smaller microbatches, more stages, a schedule with fewer microbatches in flight, or "
        "jax.checkpoint",
        stacklevel=2,
    )


def _aliases(assignment: BufferAssignment) -> tuple[InputOutputAlias, ...]:
    return assignment.occupancy.dataflow.module.input_output_alias
