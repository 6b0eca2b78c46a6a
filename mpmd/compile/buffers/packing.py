"""Packing: blocks of bytes that are in use for a while, into one arena as small as can be.

Two orders are tried, large blocks first and long-lived ones first; each block goes to the lowest place that
is free during all of its time.  The smaller arena wins.

Source: best-fit offset assignment as in XLA's global-decreasing-size heap algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes: a cache line, and the width of the widest vectors."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes in use from one instant to another, both included.

    Attributes:
        size: bytes.
        start, end: instants.
    """

    size: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the blocks lie.

    Attributes:
        offsets: of each block, a multiple of `ALIGNMENT`.
        size: bytes of the arena.
        lower_bound: no arena can be smaller: the most bytes in use at one instant.
    """

    offsets: tuple[int, ...]
    size: int
    lower_bound: int


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(blocks: Sequence[Block]) -> Packing:
    """The better of two orders."""

    def size_first(n: int) -> tuple[int, int, int]:
        return -blocks[n].size, blocks[n].start - blocks[n].end, n

    def duration_first(n: int) -> tuple[int, int, int]:
        return blocks[n].start - blocks[n].end, -blocks[n].size, n

    bound = lower_bound(blocks)
    best: tuple[tuple[int, ...], int] | None = None
    for order in (size_first, duration_first):
        offsets, size = _placed(blocks, sorted(range(len(blocks)), key=order))
        if best is None or size < best[1]:
            best = offsets, size
        if size == bound:
            break
    assert best is not None
    return Packing(*best, bound)


def _placed(blocks: Sequence[Block], order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets = [0] * len(blocks)
    placed: list[int] = []  # by offset
    total = 0
    for number in order:
        block = blocks[number]
        size, at, best = aligned(block.size), 0, None
        for other in placed:
            there = blocks[other]
            if there.start <= block.end and block.start <= there.end:
                gap = offsets[other] - at
                if gap >= size and (best is None or gap < best[0]):
                    best = gap, at
                at = max(at, offsets[other] + aligned(there.size))
        offsets[number] = best[1] if best is not None else at
        total = max(total, offsets[number] + size)
        if size:
            _insert(placed, offsets, number)
    return tuple(offsets), total


def _insert(placed: list[int], offsets: Sequence[int], number: int) -> None:
    low, high = 0, len(placed)
    while low < high:
        middle = (low + high) // 2
        if offsets[placed[middle]] < offsets[number]:
            low = middle + 1
        else:
            high = middle
    placed.insert(low, number)


def lower_bound(blocks: Sequence[Block]) -> int:
    """The most bytes in use at one instant."""
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.start] = changes.get(block.start, 0) + aligned(block.size)
        changes[block.end + 1] = changes.get(block.end + 1, 0) - aligned(block.size)
    most = now = 0
    for instant in sorted(changes):
        now += changes[instant]
        most = max(most, now)
    return most
