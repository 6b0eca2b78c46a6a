"""Temporaries in the memory of results, before those are written.

A result's memory is the program's from its beginning.  Until the result is computed, and between the last
use of a donated parameter and the result that takes its place, other values may lie there: as many as lower
the most that is in use at once elsewhere, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpmd.compile.buffers.packing import LiveBlock, Room

Loan = tuple[int, int]
"""(number of an allocation, offset in it)."""


def borrow(blocks: Sequence[LiveBlock], rooms: Mapping[int, Room]) -> dict[int, Loan]:
    """Blocks that go into other memory.

    The largest block that is in use at the peak moves first; then the peak is another.  It ends when nothing
    at the peak finds room.

    Args:
        blocks: what the arena would hold.
        rooms: by number of the allocation; they are filled.

    Returns:
        Where each block lies that moved, by its number in `blocks`.
    """
    moved: dict[int, Loan] = {}
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
            loan = _find(blocks[number].size, when[number], by_capacity, rooms)
            if loan is not None:
                chosen, moved[number] = number, loan
                break
        if chosen is None:
            break
        for span in blocks[chosen].spans:
            in_use[span.start : span.end + 1] -= blocks[chosen].size
    return moved


def _find(size: int, when: int, order: Sequence[int], rooms: Mapping[int, Room]) -> Loan | None:
    """The smallest allocation with room for a block, which is placed there."""
    for number in order:
        offset = rooms[number].place(size, when)
        if offset is not None:
            return number, offset
    return None
