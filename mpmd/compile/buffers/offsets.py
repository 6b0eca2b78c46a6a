"""Packing: blocks of bytes with live ranges, into one arena of minimal size.

Several orders are tried; each block goes to the smallest gap that is free during its live ranges.  The
smallest arena wins.

Source: best-fit offset assignment as in XLA's global-decreasing-size heap algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpmd.compile.analysis.liveness import LiveRange

_LARGE = 1024  # bytes: from here on vectors should not cross cache lines


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
        return bits(self.spans)

    @property
    def duration(self) -> int:
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
    instants = 0
    for span in spans:
        instants |= (1 << (span.end + 1)) - (1 << span.start)
    return instants


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

    def place(self, size: int, instants: int) -> int | None:
        """Places a block in the smallest gap and returns its offset; None if there is no room.

        Args:
            size: bytes of the block.
            instants: when it is in use.
        """
        if not size:
            return 0
        if instants & self.busy:
            return None
        step = self.memory.alignment_of(size)
        # Blocks by offset, and among them only those in use at the same time: `at` is the end of what they
        # cover so far, so a gap is the space between it and the next of them.
        at, best, fits = 0, -1, 0
        for offset, end, when in self._placed:
            if when & instants:
                gap = offset - at
                if gap >= size and (best < 0 or gap < fits):
                    best, fits = at, gap
                # Blocks at other times may overlap, so ends do not ascend with offsets.
                if end > at:
                    at = -(-end // step) * step
        # No gap is large enough: above all that is in use meanwhile.
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
    bound, when = lower_bound(blocks), [b.instants for b in blocks]
    best: tuple[tuple[int, ...], int] | None = None
    for key in _orders(blocks):
        placed = _placed(blocks, when, memory, sorted(range(len(blocks)), key=key))
        if best is None or placed[1] < best[1]:
            best = placed
        # No packing is smaller than the bytes live at one instant.
        if best[1] == bound:
            break
    assert best is not None
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


def _placed(
    blocks: Sequence[LiveBlock],
    when: Sequence[int],
    memory: DeviceMemory,
    order: Sequence[int],
) -> tuple[tuple[int, ...], int]:
    offsets, room = [0] * len(blocks), Room(memory=memory)
    for number in order:
        offset = room.place(blocks[number].size, when[number])
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
            # Both ends of a span are included: it ends after its last instant.
            changes[span.end + 1] = changes.get(span.end + 1, 0) - block.size
    most = now = at = 0
    for instant in sorted(changes):
        now += changes[instant]
        if now > most:
            most, at = now, instant
    return most, at
