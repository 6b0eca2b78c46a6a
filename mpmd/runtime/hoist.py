"""Issues receives early, so that bytes move while the fragment before still runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd.runtime.instructions import Feed, Instruction, Recv, Run, Send
from mpmd.runtime.program import Program


def hoist_receives(program: Program, distance: int) -> Program:
    """Moves every receive up past at most `distance` runs, except where that would deadlock.

    ```
    run a; recv x; run b(x)   ->   recv x; run a; run b(x)
    ```

    A receive never passes a feed or another receive.  The streams are then advanced together as far as they
    go; where all wait, the first one that waits at a moved receive gets it back in its old place.

    Requires: a valid program.
    Ensures: a valid program with the same instructions.
    Cost: O(instructions × meshes).
    """
    sweep = _StreamSweep(program, [_Lane(stream.instructions, distance) for stream in program.streams])
    while sweep.advance() or sweep.put_one_back():
        pass
    streams = tuple(
        dataclasses.replace(stream, instructions=tuple(lane.code))
        for stream, lane in zip(program.streams, sweep.lanes, strict=True)
    )
    return dataclasses.replace(program, streams=streams)


class _Lane:
    """One stream with its receives moved up, and how far it has been advanced."""

    def __init__(self, instructions: Sequence[Instruction], distance: int) -> None:
        self.at = 0
        self.code: list[Instruction] = []
        self.anchors: dict[int, Instruction] = {}  # id of a moved receive -> what it stood before
        for k, op in enumerate(instructions):
            place = self._place(op, distance)
            if place < len(self.code):
                rest = (o for o in instructions[k + 1 :] if not isinstance(o, Recv))
                self.anchors[id(op)] = next(rest, op)
            self.code.insert(place, op)

    def _place(self, op: Instruction, distance: int) -> int:
        place = at = len(self.code)
        runs = 0
        while (
            isinstance(op, Recv)
            and at
            and runs < distance
            and not isinstance(self.code[at - 1], (Recv, Feed))
        ):
            at -= 1
            if isinstance(self.code[at], Run):
                runs, place = runs + 1, at
        return place

    def put_back(self) -> bool:
        """Puts the receive at which the stream waits back where it stood; whether it had been moved."""
        op = self.code[self.at]
        anchor = self.anchors.pop(id(op), None)
        if anchor is None:
            return False
        del self.code[self.at]
        later = range(self.at, len(self.code))
        self.code.insert(next((k for k in later if self.code[k] is anchor), len(self.code)), op)
        return True


class _StreamSweep:
    """All streams, advanced by what has been sent and received."""

    def __init__(self, program: Program, lanes: list[_Lane]) -> None:
        self.lanes = lanes
        self.capacities = [channel.properties.capacity for channel in program.channels]
        self.sent: list[set[int]] = [set() for _ in program.channels]
        self.received = [0] * len(program.channels)

    def advance(self) -> bool:
        """Advances every stream as far as it goes; whether any moved."""
        moved = False
        for lane in self.lanes:
            while lane.at < len(lane.code) and self._can_issue(lane.code[lane.at]):
                op = lane.code[lane.at]
                if isinstance(op, Send):
                    self.sent[op.channel].add(op.sequence)
                elif isinstance(op, Recv):
                    self.received[op.channel] += 1
                lane.at += 1
                moved = True
        return moved

    def _can_issue(self, op: Instruction) -> bool:
        if isinstance(op, Recv):
            return op.sequence in self.sent[op.channel]
        if isinstance(op, Send):
            capacity = self.capacities[op.channel]
            return capacity is None or len(self.sent[op.channel]) - self.received[op.channel] < capacity
        return True

    def put_one_back(self) -> bool:
        """Puts back the first moved receive at which a stream waits; False if there is none."""
        return any(lane.at < len(lane.code) and lane.put_back() for lane in self.lanes)
