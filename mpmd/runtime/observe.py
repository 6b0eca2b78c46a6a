"""Observers of a step: several at once, and the check for NaNs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mpmd.runtime.interpreter import (
    BoundCall,
    BoundFeed,
    BoundInstruction,
    CallFailed,
    Frame,
    Observer,
    failure_of,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Observers:
    """Tells several observers, in order."""

    members: tuple[Observer, ...]

    def calling(self, call: BoundCall, frame: Frame) -> None:
        """Passes it on."""
        for member in self.members:
            member.calling(call, frame)

    def ran(self, call: BoundCall, frame: Frame, issued: float) -> None:
        """Passes it on."""
        for member in self.members:
            member.ran(call, frame, issued)

    def issued(self, instruction: BoundInstruction, frame: Frame) -> None:
        """Passes it on."""
        for member in self.members:
            member.issued(instruction, frame)


class NanCheck:
    """Waits for every fragment and stops at the first with a NaN in its results.

    No fragment before it made one; if it came with an argument of the step, the error names that.
    """

    def __init__(self) -> None:
        self._arguments: dict[int, tuple[str, int]] = {}

    def calling(self, call: BoundCall, frame: Frame) -> None:
        """Nothing to look at before a call."""

    def ran(self, call: BoundCall, frame: Frame, issued: float) -> None:
        """Looks at the results of a call.

        Raises:
            CallFailed: one of them holds a NaN, or the fragment failed on its device.
        """
        for k, slot in enumerate(call.outputs):
            if (failure := failure_of(frame.slots[slot])) is not None:
                raise CallFailed(call, frame.number, failure)
            if count := count_nans(frame.slots[slot]):
                text = f"result {k} of {len(call.outputs)} holds {_nan_values(count)}"
                given = [self._arguments[i] for i in call.inputs if i in self._arguments]
                if given:
                    path, of_argument = given[0]
                    text += f", and so did argument {path} of the step: {_nan_values(of_argument)}"
                raise CallFailed(call, frame.number, FloatingPointError(text))

    def issued(self, instruction: BoundInstruction, frame: Frame) -> None:
        """Remembers arguments that hold a NaN; other instructions make no numbers."""
        if isinstance(instruction, BoundFeed) and (count := count_nans(frame.slots[instruction.buffer])):
            self._arguments[instruction.buffer] = (instruction.path, count)


def _nan_values(count: int) -> str:
    return f"{count} NaN value{'s' * (count > 1)}"


def count_nans(array: Any) -> int:
    """NaN values in an array of floating or complex numbers; 0 for other element types.  Waits for it."""
    if not np.issubdtype(array.dtype, np.inexact) and "float" not in str(array.dtype):
        return 0
    shards = getattr(array, "addressable_shards", None)
    if shards is None:
        return int(np.isnan(array).sum())
    # A view of device memory would keep it from being donated: each is dropped before the next instruction.
    return sum(int(np.isnan(np.asarray(s.data)).sum()) for s in shards if s.replica_id == 0)
