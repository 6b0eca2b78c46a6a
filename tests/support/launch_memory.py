"""The memory of one launch: each argument has an address range of its own, and nothing else can be reached.

Kernels are given addresses that do not exist.  An access is translated to the array in whose range it is;
what is before or behind that array is an error, also where another one lies there.  An array without memory
has bounds alone: zeros are read, and what is stored is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_RANGE = 48  # bits of an address range; its array begins in the middle
_BEGIN = 1 << (_RANGE - 1)


@dataclasses.dataclass(frozen=True)
class Extent:
    """An argument: where it begins, or 0 for one without memory, and its bytes."""

    address: int
    size: int

    @staticmethod
    def of(array: np.ndarray) -> Extent:
        """An array from its first element on."""
        return Extent(array.ctypes.data, array.nbytes)


class OutOfBounds(Exception):
    """A kernel reads or writes what is not its argument."""


class LaunchMemory:
    """The arguments of a launch.

    Args:
        extents: of each.
        names: of each, for errors.
    """

    def __init__(self, extents: Sequence[Extent], names: Sequence[str]) -> None:
        self.extents, self.names = extents, names
        self._at = np.array([e.address for e in extents], np.uint64)
        self._sizes = np.array([e.size for e in extents], np.int64)

    def pointer(self, number: int) -> int:
        """What a kernel is given for an argument: as far from multiples of 16 bytes as it is."""
        return (number + 1 << _RANGE) + _BEGIN + self.extents[number].address % 16

    def translated(
        self, pointers: np.ndarray, mask: np.ndarray, size: int, what: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Real addresses of elements, and the mask of those that have memory.

        Raises:
            OutOfBounds: an accessed one lies outside of every argument.
        """
        pointers, mask = np.broadcast_arrays(pointers, mask)
        active = pointers[mask]
        numbers = (active >> np.uint64(_RANGE)).astype(np.int64) - 1
        known = (numbers >= 0) & (numbers < len(self.extents))
        if not known.all():
            raise OutOfBounds(f"{what} of {int(active[~known][0]):#x}, which is the address of nothing")
        begins = ((numbers + 1) << _RANGE) + _BEGIN + (self._at[numbers] % np.uint64(16)).astype(np.int64)
        places = active.astype(np.int64) - begins
        wrong = (places < 0) | (places + size > self._sizes[numbers])
        if wrong.any():
            number, place = int(numbers[wrong][0]), int(places[wrong][0])
            raise OutOfBounds(
                f"{what} of bytes {place} to {place + size - 1} of {self.names[number]}, "
                f"which has {self._sizes[number]}"
            )
        found, real = np.zeros(pointers.shape, np.uint64), np.zeros(pointers.shape, bool)
        found[mask] = self._at[numbers] + places.astype(np.uint64)
        real[mask] = self._at[numbers] != 0
        return found, real
