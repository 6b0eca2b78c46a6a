"""Packing: blocks of bytes with live ranges, into one arena of minimal size.

Several orders are tried; each block goes to the smallest gap that is free during its live ranges.  Where no
order reaches the bound, orders near the best are searched.  The smallest arena wins.

Source: best-fit offset assignment as in XLA's global-decreasing-size heap algorithms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpmd.compile.analysis.liveness import LiveRange

_LARGE = 1024  # bytes: from here on vectors should not cross cache lines
_MAX_TRIES = 2000  # orders that a search tries
_MAX_WORK = 4_000_000  # pairs of blocks that it compares in all of them


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """Bytes that are live in some ranges.

    Attributes:
        size: bytes.
        spans: live ranges, in order of time.
    """

    size: int
    spans: tuple[LiveRange, ...]

    @property
    def instants(self) -> int:
        """The instants as bits of a number."""
        return bits(self.spans)

    @property
    def duration(self) -> int:
        """Number of instants."""
        return sum(s.end - s.start + 1 for s in self.spans)


@dataclass(frozen=True, slots=True)
class Packing:
    """Offsets of the blocks.

    Attributes:
        offsets: of each block, a multiple of its alignment.
        size: bytes of the arena.
        lower_bound: of the size: the maximum of bytes live at one instant.
    """

    offsets: tuple[int, ...]
    size: int
    lower_bound: int


def bits(spans: Sequence[LiveRange]) -> int:
    """Instants as bits of a number: two blocks are in use at once iff their numbers have a common bit."""
    found = 0
    for span in spans:
        found |= (1 << (span.end + 1)) - (1 << span.start)
    return found


@dataclass(frozen=True)
class DeviceMemory:
    """What packing knows of the memory of a device.

    Attributes:
        alignment: bytes: where large blocks begin; a cache line, or the width of the widest access.
        spaces: the memory spaces that it has; None for any.
    """

    alignment: int = 64
    spaces: tuple[int, ...] | None = None

    def aligned(self, size: int) -> int:
        """The next multiple of the alignment."""
        return -(-size // self.alignment) * self.alignment

    def alignment_of(self, size: int) -> int:
        """The alignment of a block; small blocks have that of their elements."""
        if size >= _LARGE:
            return self.alignment
        return 1 << min(4, (size - 1).bit_length()) if size else 1


ANY_MEMORY = DeviceMemory()
"""Of no device in particular."""


class Room:
    """Memory of a given size, or without bounds, in which blocks are placed.

    Args:
        capacity: bytes; None without bounds.
        busy: instants at which none of it may be used, as bits.
        memory: the device's.
    """

    def __init__(self, capacity: int | None = None, busy: int = 0, memory: DeviceMemory = ANY_MEMORY) -> None:
        self.memory = memory
        self.capacity = capacity
        self.busy = busy
        self.top = 0
        self._placed: list[tuple[int, int, int]] = []  # (offset, end, instants), by offset

    def place(self, size: int, instants: int, *, lowest: bool = False) -> int | None:
        """Places a block and returns its offset; None if there is no room.

        Args:
            size: bytes of the block.
            instants: when it is in use.
            lowest: take the lowest gap that is large enough, not the smallest.
        """
        if not size:
            return 0
        if instants & self.busy:
            return None
        step = self.memory.alignment_of(size)
        at, best, fits = 0, -1, 0
        for offset, end, when in self._placed:
            if when & instants:
                gap = offset - at
                if gap >= size and (best < 0 or gap < fits):
                    best, fits = at, gap
                    if lowest:
                        break
                if end > at:
                    at = -(-end // step) * step
        if best < 0:
            best = at
        if self.capacity is not None and best + size > self.capacity:
            return None
        self._insert((best, best + size, instants))
        self.top = max(self.top, best + size)
        return best

    def _insert(self, entry: tuple[int, int, int]) -> None:
        low, high = 0, len(self._placed)
        while low < high:
            middle = (low + high) // 2
            if self._placed[middle][0] < entry[0]:
                low = middle + 1
            else:
                high = middle
        self._placed.insert(low, entry)


def pack(blocks: Sequence[LiveBlock], memory: DeviceMemory = ANY_MEMORY) -> Packing:
    """The smallest arena that several orders and a search among them find."""
    bound = lower_bound(blocks)
    place = functools.partial(_placed, blocks, [b.instants for b in blocks], memory)
    best: tuple[tuple[int, ...], int] | None = None
    order: list[int] = []
    for key in _orders(blocks):
        tried = sorted(range(len(blocks)), key=key)
        offsets, size = place(tried)
        if best is None or size < best[1]:
            best, order = (offsets, size), tried
        if size == bound:
            break
    assert best is not None
    if best[1] > bound:
        best = _searched(blocks, place, order, best, bound)
    return Packing(*best, bound)


def _orders(blocks: Sequence[LiveBlock]) -> list[Callable[[int], tuple[int, ...]]]:
    """Large first, long-lived first, largest bytes times instants first, and by time."""
    lasts = [b.duration for b in blocks]
    return [
        lambda n: (-blocks[n].size, -lasts[n], n),
        lambda n: (-lasts[n], -blocks[n].size, n),
        lambda n: (-lasts[n] * blocks[n].size, n),
        lambda n: (blocks[n].spans[0].start, -blocks[n].size, n),
    ]


def _searched(
    blocks: Sequence[LiveBlock],
    place: Callable[..., tuple[tuple[int, ...], int]],
    order: list[int],
    best: tuple[tuple[int, ...], int],
    bound: int,
) -> tuple[tuple[int, ...], int]:
    """Orders near a good one: blocks above the bound are placed earlier or later, or two swap positions.

    A change stays unless the arena grows.  Some order leads to the smallest arena, with every block at the
    lowest free offset; the number of tries depends on the number of blocks alone.
    """
    random = _RandomNumbers()
    offsets, size = place(order, lowest=True)
    if size < best[1]:
        best = offsets, size
    tries = min(_MAX_TRIES, _MAX_WORK // max(1, len(blocks) ** 2))
    if best[1] * 100 <= bound * 101:
        tries //= 8
    for _ in range(tries):
        if best[1] == bound:
            break
        high = [n for n in order if offsets[n] + blocks[n].size > bound]
        moved = high[random.below(len(high))]
        tried = [n for n in order if n != moved]
        tried.insert(random.below(len(tried) + 1 if random.below(2) else len(tried) // 2 + 1), moved)
        if random.below(3) == 0:
            i, j = random.below(len(tried)), random.below(len(tried))
            tried[i], tried[j] = tried[j], tried[i]
        placed = place(tried, lowest=True)
        if placed[1] <= size:
            order, (offsets, size) = tried, placed
            best = min(best, placed, key=lambda p: p[1])
    return best


class _RandomNumbers:
    """A deterministic random generator: a linear congruential generator."""

    def __init__(self) -> None:
        self._state = 1

    def below(self, limit: int) -> int:
        """A number from 0 to one below the limit."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & ((1 << 64) - 1)
        return (self._state >> 33) % limit


def _placed(
    blocks: Sequence[LiveBlock],
    when: Sequence[int],
    memory: DeviceMemory,
    order: Sequence[int],
    *,
    lowest: bool = False,
) -> tuple[tuple[int, ...], int]:
    offsets, room = [0] * len(blocks), Room(memory=memory)
    for number in order:
        offset = room.place(blocks[number].size, when[number], lowest=lowest)
        assert offset is not None, "a room without bounds has room"
        offsets[number] = offset
    return tuple(offsets), room.top


def lower_bound(blocks: Sequence[LiveBlock]) -> int:
    """The maximum of bytes live at one instant."""
    return peak_of(blocks)[0]


def peak_of(blocks: Sequence[LiveBlock]) -> tuple[int, int]:
    """(the maximum of bytes live at one instant, the first such instant)."""
    changes: dict[int, int] = {}
    for block in blocks:
        for span in block.spans:
            changes[span.start] = changes.get(span.start, 0) + block.size
            changes[span.end + 1] = changes.get(span.end + 1, 0) - block.size
    most = now = at = 0
    for instant in sorted(changes):
        now += changes[instant]
        if now > most:
            most, at = now, instant
    return most, at
