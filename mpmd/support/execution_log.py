"""A log in memory to which machine code writes its times: one entry per execution, from any thread.

An entry is four integers of 64 bits: the key, the device, and begin and end in nanoseconds of
CLOCK_MONOTONIC, the clock of Python's `time.perf_counter` on Linux.  A writer takes the next number with
one atomic addition and fills the entry of that number; beyond the capacity it only counts.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

COUNT_AT, CAPACITY_AT, ENTRIES_AT = 0, 8, 64
"""Bytes from the start of the log to its fields."""

ENTRY_BYTES = 32
ENTRY = {"key": 0, "device": 8, "begin": 16, "end": 24}
"""Bytes from the start of an entry to its fields."""

CLOCK_MONOTONIC = 1
"""The number of the clock on Linux."""


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """One entry.

    Attributes:
        key: of the code that ran.
        device: number of the device in the mesh, as the writer numbers them.
        begin_s, end_s: seconds of `time.perf_counter`.
    """

    key: int
    device: int
    begin_s: float
    end_s: float


class TimeLog(Protocol):
    """A log as those see it who give its address to writers, and who read it."""

    def address_of(self, device: int) -> int:
        """What a writer on a device, by its number in this process, is given."""

    def entries(self) -> tuple[Execution, ...]:
        """Every entry, in order for each key and device; all writers must have ended."""

    @property
    def error_s(self) -> float:
        """How far its times may be from the host's clock."""


class ExecutionLog:
    """An empty log.  The owner of a copy of its address keeps it alive.

    Args:
        capacity: entries for which it has room.
    """

    def __init__(self, capacity: int) -> None:
        self._words = np.zeros((ENTRIES_AT + capacity * ENTRY_BYTES) // 8, np.int64)
        self._words[CAPACITY_AT // 8] = capacity

    @property
    def address(self) -> int:
        return int(self._words.ctypes.data)

    def address_of(self, device: int) -> int:
        return self.address

    @property
    def error_s(self) -> float:
        """0: it is the host's clock."""
        return 0.0

    @property
    def capacity(self) -> int:
        return int(self._words[CAPACITY_AT // 8])

    @property
    def written(self) -> int:
        """The number of entries written, those beyond the capacity included."""
        return int(self._words[COUNT_AT // 8])

    def entries(self) -> tuple[Execution, ...]:
        """Every entry, in the order of their numbers; all writers must have ended."""
        first, count = ENTRIES_AT // 8, min(self.written, self.capacity)
        table = self._words[first : first + 4 * count].reshape(count, 4).tolist()
        return tuple(Execution(key, device, begin * 1e-9, end * 1e-9) for key, device, begin, end in table)
