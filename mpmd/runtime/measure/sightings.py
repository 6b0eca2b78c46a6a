"""When arrays are ready, seen from the host: threads that wait for them, late by about 0.1 ms."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from typing import Any

from mpmd.runtime.program.instructions import Recv, donated_buffers
from mpmd.runtime.program.streams import Stream
from mpmd.runtime.run.waiting import failure_of


@dataclasses.dataclass(slots=True)
class Sighting:
    """An instruction of a mesh: when it was issued, its handle, and when that was ready."""

    at: int
    issued: float
    handle: Any = None
    end: float = 0.0


class Watcher:
    """Waits for handles in order and records when they arrive."""

    def __init__(self, mesh: str) -> None:
        self.sightings: list[Sighting] = []
        self._queue: queue.SimpleQueue[Sighting | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"mpmd-watch-{mesh}", daemon=True)
        self._thread.start()

    def add(self, sighting: Sighting) -> None:
        """Waits for another one, after those before."""
        self._queue.put(sighting)

    def wait(self) -> None:
        """Returns when everything added so far has arrived."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()

    def close(self, wait: bool = True) -> None:
        """Ends the thread after what it waits for; with `wait` once it has ended."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _watch(self) -> None:
        while (sighting := self._queue.get()) is not None:
            if isinstance(sighting, threading.Event):
                sighting.set()
                continue
            failure_of(sighting.handle)  # a failure is reported by the executor; here it is only an end
            sighting.end, sighting.handle = time.perf_counter(), None
            self.sightings.append(sighting)


def consumed_receives(stream: Stream) -> list[int]:
    """Positions of receives whose buffer a later run consumes: such an array cannot be waited for."""
    consumed = {b for op in stream.instructions for b in donated_buffers(op)}
    return [at for at, op in enumerate(stream.instructions) if isinstance(op, Recv) and op.buffer in consumed]
