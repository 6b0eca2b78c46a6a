"""Threads that issue streams, one per mesh, kept from step to step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from mpmd.runtime.channels.protocol import Stopped
from mpmd.runtime.interpreter import BoundInstruction, Frame, issue_all

_STOP_SECONDS = 0.5
"""How long a stopped step may take until its threads are left to themselves."""


class _Job:
    """The streams of one step; done when every thread has ended its own."""

    def __init__(self, frame: Frame, streams: int) -> None:
        self.frame, self.failures = frame, list[BaseException]()
        self.done = threading.Event()
        self._left, self._lock = streams, threading.Lock()

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.frame.stop()

    def end_stream(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.done.set()


class Workers:
    """One daemon thread per mesh.  Threads end with `close`."""

    def __init__(self, meshes: Sequence[str]) -> None:
        self._queues: list[queue.SimpleQueue[tuple[_Job, Sequence[BoundInstruction]] | None]] = []
        self.threads: list[threading.Thread] = []
        self._last: _Job | None = None
        for mesh in meshes:
            jobs: queue.SimpleQueue[tuple[_Job, Sequence[BoundInstruction]] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_work, args=(jobs,), name=f"mpmd-{mesh}", daemon=True)
            self._queues.append(jobs)
            self.threads.append(thread)
            thread.start()

    def issue(self, streams: Sequence[Sequence[BoundInstruction]], frame: Frame) -> None:
        """Issues one stream per thread; returns when all have been issued.

        Raises:
            Exception: the first failure of any thread.
            KeyboardInterrupt: the user interrupted; the threads were told to stop.
        """
        self.wait()
        job = self._last = _Job(frame, len(streams))
        for jobs, stream in zip(self._queues, streams, strict=True):
            jobs.put((job, stream))
        try:
            job.done.wait()
        except BaseException:  # a signal arrived: tell the threads, then let it go on its way
            frame.stop()
            job.done.wait(_STOP_SECONDS)
            raise
        self._last = None
        if job.failures:
            raise job.failures[0]

    def wait(self) -> None:
        """Returns when no thread is busy with an earlier step, such as one that was interrupted."""
        if self._last is not None:
            self._last.done.wait()
            self._last = None

    def close(self) -> None:
        """Ends the threads once they have issued what they were given."""
        for jobs in self._queues:
            jobs.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_SECONDS)


def _work(jobs: queue.SimpleQueue[tuple[_Job, Sequence[BoundInstruction]] | None]) -> None:
    while (given := jobs.get()) is not None:
        job, stream = given
        try:
            issue_all(stream, job.frame)
        except Stopped:
            pass
        except BaseException as error:  # carried to the thread that waits for the step, which raises it
            job.fail(error)
        job.end_stream()
        del given, job, stream  # nothing may live on while this thread waits
