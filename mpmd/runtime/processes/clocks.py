"""Clocks of the processes, compared over the key-value store.

Each process asks process 0 for its time, several times in turn.  The answer was written between the question
and its arrival: half of the shortest round trip is the error.
"""

from __future__ import annotations

import dataclasses
import time

from mpmd.runtime.processes.exchange import WorldExchange

_ROUNDS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ClockOffset:
    """Offset of this process's `time.perf_counter` to process 0's.

    Attributes:
        seconds: to add to a time here to get process 0's.
        error_s: the largest error of it, in seconds.
    """

    seconds: float
    error_s: float


def compare_clocks(exchange: WorldExchange) -> ClockOffset:
    """Compares the clock of this process with process 0's.

    Raises:
        PeerError: a process failed meanwhile.
    """
    world = exchange.world
    offset = ClockOffset(0.0, 0.0 if world.index == 0 else float("inf"))
    for process in range(1, world.count):
        for _ in range(_ROUNDS):
            question, answer = f"clock/{process}/question", f"clock/{process}/answer"
            if world.index == 0:
                exchange.take(question)
                exchange.put(answer, repr(time.perf_counter()))
            elif world.index == process:
                begin = time.perf_counter()
                exchange.put(question, "")
                there = float(exchange.take(answer))
                half = (time.perf_counter() - begin) / 2
                if half < offset.error_s:
                    offset = ClockOffset(there - begin - half, half)
    return offset
