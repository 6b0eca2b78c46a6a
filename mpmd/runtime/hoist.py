"""Issues receives early, so that bytes move while the fragment before still runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd.runtime.instructions import Feed, Instruction, Recv, Run
from mpmd.runtime.order import blocked_positions
from mpmd.runtime.program import Program


def hoist_receives(program: Program, distance: int) -> Program:
    """Moves every receive up past at most `distance` runs, except where that would deadlock.

    ```
    run a; recv x; run b(x)   ->   recv x; run a; run b(x)
    ```

    A receive never passes a feed or another receive.  Where the moved receives block a stream, they go back
    to their place, and the rest is tried again: each round puts at least one back.

    Cost: O(rounds × instructions); one round unless a move would deadlock.
    """
    fixed: set[tuple[int, int]] = set()  # messages, as (channel, sequence), that stay
    while True:
        streams = tuple(
            dataclasses.replace(s, instructions=tuple(_hoisted(s.instructions, distance, fixed)))
            for s in program.streams
        )
        moved = dataclasses.replace(program, streams=streams)
        blocked = blocked_positions(moved)
        stuck = [streams[s].instructions[at] for s, at in blocked.items()]
        messages = {(op.channel, op.sequence) for op in stuck if isinstance(op, Recv)} - fixed
        if not blocked or not messages:
            return program if blocked else moved
        fixed |= messages


def _hoisted(
    instructions: Sequence[Instruction], distance: int, fixed: set[tuple[int, int]]
) -> list[Instruction]:
    result: list[Instruction] = []
    for op in instructions:
        to = len(result)
        if isinstance(op, Recv) and (op.channel, op.sequence) not in fixed:
            runs, at = 0, len(result)
            while at and runs < distance and not isinstance(result[at - 1], (Recv, Feed)):
                at -= 1
                if isinstance(result[at], Run):
                    runs, to = runs + 1, at
        result.insert(to, op)
    return result
