"""Packing: blocks of bytes that are in use for a while, into one arena as small as can be.

Several orders are tried; each block goes to the smallest gap that is free during all of its time.  Where no
order reaches the bound, what stands highest is placed earlier, again and again.  The smallest arena wins.

Source: best-fit offset assignment as in XLA's global-decreasing-size heap algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpmd.compile.buffers.ranges import Span

ALIGNMENT = 64
"""Bytes: a cache line, and the width of the widest vectors."""

_LARGE = 1024  # bytes: from here on it is worth much that vectors cross no lines
_ROUNDS = 40  # of placing earlier what stands highest
_MOST_PLACINGS = 20_000  # blocks placed in all of these rounds together


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes in use at some instants.

    Attributes:
        size: bytes.
        spans: when, in order of time.
    """

    size: int
    spans: tuple[Span, ...]

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
    """Where the blocks lie.

    Attributes:
        offsets: of each block, a multiple of its alignment.
        size: bytes of the arena.
        lower_bound: no arena can be smaller: the most bytes in use at one instant.
    """

    offsets: tuple[int, ...]
    size: int
    lower_bound: int


def bits(spans: Sequence[Span]) -> int:
    """Instants as bits of a number: two blocks are in use at once iff their numbers have a common bit."""
    found = 0
    for span in spans:
        found |= (1 << (span.end + 1)) - (1 << span.start)
    return found


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def alignment_of(size: int) -> int:
    """Where a block of so many bytes may begin: at lines, and small ones wherever their elements can lie."""
    if size >= _LARGE:
        return ALIGNMENT
    return 1 << min(4, (size - 1).bit_length()) if size else 1


class Room:
    """Memory of a given size, or without bounds, in which blocks are placed.

    Args:
        capacity: bytes; None without bounds.
        busy: instants at which none of it may be used, as bits.
    """

    def __init__(self, capacity: int | None = None, busy: int = 0) -> None:
        self.capacity = capacity
        self.busy = busy
        self.top = 0
        self._placed: list[tuple[int, int, int]] = []  # (offset, end, instants), by offset

    def place(self, size: int, instants: int) -> int | None:
        """The offset at which a block stands from now on; None if there is no room."""
        if not size:
            return 0
        if instants & self.busy:
            return None
        step = alignment_of(size)
        at, best, fits = 0, -1, 0
        for offset, end, when in self._placed:
            if when & instants:
                gap = offset - at
                if gap >= size and (best < 0 or gap < fits):
                    best, fits = at, gap
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


def pack(blocks: Sequence[Block]) -> Packing:
    """The smallest arena that several orders and a search among them find."""
    bound = lower_bound(blocks)
    when = [b.instants for b in blocks]
    best: tuple[tuple[int, ...], int] | None = None
    order: list[int] = []
    for key in _orders(blocks):
        tried = sorted(range(len(blocks)), key=key)
        offsets, size = _placed(blocks, when, tried)
        if best is None or size < best[1]:
            best, order = (offsets, size), tried
        if size == bound:
            break
    assert best is not None
    if best[1] > bound:
        best = _searched(blocks, when, order, best, bound)
    return Packing(*best, bound)


def _orders(blocks: Sequence[Block]) -> list[Callable[[int], tuple[int, ...]]]:
    """Large first, long-lived first, most bytes times instants first, and as they come in time."""
    lasts = [b.duration for b in blocks]
    return [
        lambda n: (-blocks[n].size, -lasts[n], n),
        lambda n: (-lasts[n], -blocks[n].size, n),
        lambda n: (-lasts[n] * blocks[n].size, n),
        lambda n: (blocks[n].spans[0].start, -blocks[n].size, n),
    ]


def _searched(
    blocks: Sequence[Block],
    when: Sequence[int],
    order: list[int],
    best: tuple[tuple[int, ...], int],
    bound: int,
) -> tuple[tuple[int, ...], int]:
    """Place what stands highest before what it stands on, as long as there is time and it may help."""
    current = best
    for _ in range(min(_ROUNDS, _MOST_PLACINGS // max(1, len(blocks)))):
        offsets, _ = current
        highest = max(range(len(blocks)), key=lambda n: (offsets[n] + blocks[n].size, -n))
        position = order.index(highest)
        if position == 0:
            break
        before = [k for k in range(position) if when[order[k]] & when[highest]]
        order = order[:position] + order[position + 1 :]
        order.insert(before[len(before) // 2] if before else 0, highest)
        current = _placed(blocks, when, order)
        if current[1] < best[1]:
            best = current
        if best[1] == bound:
            break
    return best


def _placed(
    blocks: Sequence[Block], when: Sequence[int], order: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    offsets, room = [0] * len(blocks), Room()
    for number in order:
        offset = room.place(blocks[number].size, when[number])
        assert offset is not None, "a room without bounds has room"
        offsets[number] = offset
    return tuple(offsets), room.top


def lower_bound(blocks: Sequence[Block]) -> int:
    """The most bytes in use at one instant."""
    return peak_of(blocks)[0]


def peak_of(blocks: Sequence[Block]) -> tuple[int, int]:
    """(the most bytes in use at one instant, the first such instant)."""
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
