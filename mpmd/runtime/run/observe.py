"""Observers of a step: several at once, and the check for NaNs and infinities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from mpmd.runtime.run.interpreter import (
    BoundCall,
    BoundFeed,
    BoundInstruction,
    CallFailed,
    Observer,
    StepState,
)
from mpmd.runtime.run.waiting import failure_of


@dataclasses.dataclass(frozen=True, slots=True)
class Observers:
    """Calls several observers, in order."""

    members: tuple[Observer, ...]

    def calling(self, call: BoundCall, frame: StepState) -> None:
        for member in self.members:
            member.calling(call, frame)

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        for member in self.members:
            member.ran(call, frame, issued)

    def issued(self, instruction: BoundInstruction, frame: StepState) -> None:
        for member in self.members:
            member.issued(instruction, frame)


class FiniteCheck(Observer):
    """Waits for every fragment and stops at the first with a NaN, or an infinity, in its results.

    No fragment before it computed one; if it was in an argument of the step, the error names that.
    """

    def __init__(self, *, nans: bool = True, infs: bool = False) -> None:
        """Takes whether to check for NaNs, infinities or both."""
        self._tests = [
            *([("NaN", np.isnan)] if nans else []),
            *([("infinite", np.isinf)] if infs else []),
        ]
        self._arguments: dict[int, tuple[str, str]] = {}

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        """Checks the results of a call.

        Raises:
            CallFailed: one of them holds such a value, or the fragment failed on its device.
        """
        for k, slot in enumerate(call.outputs):
            if (failure := failure_of(frame.slots[slot])) is not None:
                raise CallFailed(call, frame.number, failure)
            if problem := self._found(frame.slots[slot]):
                text = f"result {k} of {len(call.outputs)} holds {problem}"
                given = [self._arguments[i] for i in call.inputs if i in self._arguments]
                if given:
                    path, of_argument = given[0]
                    text += f", and so did argument {path} of the step: {of_argument}"
                raise CallFailed(call, frame.number, FloatingPointError(text))

    def issued(self, instruction: BoundInstruction, frame: StepState) -> None:
        """Records arguments that hold such a value; other instructions compute nothing."""
        if isinstance(instruction, BoundFeed) and (problem := self._found(frame.slots[instruction.buffer])):
            self._arguments[instruction.buffer] = (instruction.path, problem)

    def _found(self, array: Any) -> str:
        """The values found in the array, such as `2 NaN values`; empty if there are none."""
        for kind, test in self._tests:
            if count := count_values(array, test):
                return f"{count} {kind} value{'s' * (count > 1)}"
        return ""


def count_values(array: Any, test: Callable[[Any], Any]) -> int:
    """The number of elements of an array for which `test` (`np.isnan`, `np.isinf`) holds.  Waits for it.

    0 for element types other than floating and complex numbers.
    """
    if not np.issubdtype(array.dtype, np.inexact) and "float" not in str(array.dtype):
        return 0
    shards = getattr(array, "addressable_shards", None)
    if shards is None:
        return int(test(array).sum())
    # A view of device memory would keep it from being donated: each is dropped before the next instruction.
    return sum(int(test(np.asarray(s.data)).sum()) for s in shards if s.replica_id == 0)
