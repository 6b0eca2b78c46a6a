"""Reuse of output buffers: temporaries in the memory of results, before those are written.

A result's memory belongs to the program from its beginning.  Until the result is computed, and between the
last use of a donated parameter and the result that takes its place, it may hold other values.  Values move
there only while that lowers the peak of the arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpmd.compile.buffers.packing import LiveBlock, Room

ReusedSlice = tuple[int, int]
"""(number of an allocation, offset in it)."""


def reuse_outputs(blocks: Sequence[LiveBlock], rooms: Mapping[int, Room]) -> dict[int, ReusedSlice]:
    """Blocks that move into output buffers.

    The largest block that is in use at the peak moves first; then the peak is another.  The end is reached
    when no block at the peak fits.

    Args:
        blocks: the blocks of the arena.
        rooms: by number of the allocation; they are filled.

    Returns:
        The slice of each block that moved, by its number in `blocks`.
    """
    moved: dict[int, ReusedSlice] = {}
    if not rooms or not blocks:
        return moved
    in_use = np.zeros(max(b.spans[-1].end for b in blocks) + 1, np.int64)
    for block in blocks:
        for span in block.spans:
            in_use[span.start : span.end + 1] += block.size
    when = [b.instants for b in blocks]
    by_capacity = sorted(rooms, key=lambda r: (rooms[r].capacity or 0, r))
    waiting = sorted(range(len(blocks)), key=lambda k: (-blocks[k].size, k))
    while in_use.max():
        instant = int(in_use.argmax())
        chosen = None
        for number in [k for k in waiting if when[k] >> instant & 1]:
            waiting.remove(number)
            slice_ = _find(blocks[number].size, when[number], by_capacity, rooms)
            if slice_ is not None:
                chosen, moved[number] = number, slice_
                break
        if chosen is None:
            break
        for span in blocks[chosen].spans:
            in_use[span.start : span.end + 1] -= blocks[chosen].size
    return moved


def _find(size: int, when: int, order: Sequence[int], rooms: Mapping[int, Room]) -> ReusedSlice | None:
    """The smallest allocation with room for a block, which is placed there."""
    for number in order:
        offset = rooms[number].place(size, when)
        if offset is not None:
            return number, offset
    return None
