"""How many calls of a mesh may be unfinished when a call is issued, so that memory stays near its prediction.

XLA on CPU allocates the results of a call when it is issued, and a buffer is freed only when the last
call that reads it has ended.  A mesh to which a whole step is issued at once holds the residuals of all
microbatches together, in spite of its schedule.  So a call whose results would not fit beside the live
buffers waits for earlier calls to end.
"""

from __future__ import annotations

import itertools

from mpmd.runtime.instructions import Feed, Free, Run, donated_buffers, reads, writes
from mpmd.runtime.program import Stream

SLACK_SHARE, SLACK_BYTES = 25, 16 << 20
"""Bytes that calls issued ahead may hold beyond the predicted peak: 1/25 of that, or so many bytes."""


def unfinished_calls(stream: Stream, at_most: int) -> dict[int, int]:
    """Per position of a `Run` the maximum of unfinished calls once it is issued, itself included: 1 or more.

    Args:
        stream: the instructions of a mesh.
        at_most: the upper bound of all of them.

    Cost: linear in the instructions, times `at_most`.
    """
    positions = [at for at, op in enumerate(stream.instructions) if isinstance(op, Run)]
    taken, given_back = _taken_and_given_back(stream)
    peak = max((taken[k] - given_back[k] for k in range(len(positions))), default=0)
    budget = peak + max(peak // SLACK_SHARE, SLACK_BYTES)
    limits = {}
    for k, at in enumerate(positions):
        fits = (n for n in range(at_most, 1, -1) if taken[k] - given_back[max(0, k + 1 - n)] <= budget)
        limits[at] = next(fits, 1)
    return limits


def _taken_and_given_back(stream: Stream) -> tuple[list[int], list[int]]:
    """Per call the bytes allocated before it is issued; per number of calls those freed by their end.

    A consumed buffer becomes a result: it is neither allocated nor freed.
    """
    size = [buffer.type.bytes for buffer in stream.buffers]
    total = sum(size[op.buffer] for op in stream.instructions if isinstance(op, Feed))
    last_call: dict[int, int] = {}
    taken: list[int] = []
    back = [0]
    for op in stream.instructions:
        if isinstance(op, Run):
            total += sum(size[b] for b in op.outputs) - sum(size[b] for b in donated_buffers(op))
            taken.append(total)
            back.append(0)
            last_call.update(dict.fromkeys((*reads(op), *op.outputs), len(taken)))
        elif isinstance(op, Free):
            for buffer in op.buffers:
                back[last_call.get(buffer, 0)] += size[buffer]
        elif not isinstance(op, Feed):
            total += sum(size[b] for b in writes(op))
    return taken, list(itertools.accumulate(back))
