"""Threads that issue streams, one per mesh, kept from step to step."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Sequence

from mpmd.runtime.channels.protocol import Stopped
from mpmd.runtime.run.interpreter import BoundInstruction, StepState, issue_all

_STOP_SECONDS = 0.5
"""Timeout for a stopped step; its threads are then abandoned."""


class _Job:
    """The streams of one step; done when every thread has ended its own; ending twice is harmless."""

    def __init__(self, frame: StepState, streams: int) -> None:
        self.frame, self.failures = frame, list[BaseException]()
        self.done = threading.Event()
        self._left, self._lock = set(range(streams)), threading.Lock()

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.frame.stop()

    def end_stream(self, number: int) -> None:
        with self._lock:
            self._left.discard(number)
            if not self._left:
                self.done.set()


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """The work of one thread for a job: the stream of that number."""

    job: _Job
    number: int
    stream: Sequence[BoundInstruction]


class Workers:
    """One daemon thread per mesh.  Threads end with `close`."""

    def __init__(self, meshes: Sequence[str]) -> None:
        self._queues: list[queue.SimpleQueue[_Task | None]] = []
        self.threads: list[threading.Thread] = []
        self._last: _Job | None = None
        for mesh in meshes:
            tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_work, args=(tasks,), name=f"mpmd-{mesh}", daemon=True)
            self._queues.append(tasks)
            self.threads.append(thread)
            thread.start()

    def issue(self, streams: Sequence[Sequence[BoundInstruction]], frame: StepState) -> None:
        """Issues one stream per thread; returns when all have been issued.

        Raises:
            Exception: the first failure of any thread.
            Stopped: the step was stopped, and a thread did not end.
            KeyboardInterrupt: the user interrupted; the threads were stopped.
        """
        self.wait()
        job = _Job(frame, len(streams))
        try:
            self._last = job
            self._hand_out(job, streams)
            while not job.done.wait(_STOP_SECONDS):
                if frame.stopped and not job.failures and not job.done.wait(_STOP_SECONDS):
                    raise Stopped  # a thread is in a call that may never return
        except BaseException:  # a signal arrived: stop the threads, then raise it again
            frame.stop()
            # it may have arrived before every thread had its stream: those end without one
            self._hand_out(job, [()] * len(streams))
            job.done.wait(_STOP_SECONDS)
            raise
        self._last = None
        if job.failures:
            raise job.failures[0]

    def _hand_out(self, job: _Job, streams: Sequence[Sequence[BoundInstruction]]) -> None:
        for number, (tasks, stream) in enumerate(zip(self._queues, streams, strict=True)):
            tasks.put(_Task(job, number, stream))

    def wait(self) -> None:
        """Returns when no thread is busy with an earlier step, such as one that was interrupted."""
        if self._last is not None:
            self._last.done.wait()
            self._last = None

    def close(self) -> None:
        """Ends the threads once they have issued their streams."""
        for tasks in self._queues:
            tasks.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_SECONDS)


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            issue_all(task.stream, task.job.frame)
        except Stopped:
            pass
        except BaseException as error:  # carried to the thread that waits for the step, which raises it
            task.job.fail(error)
        task.job.end_stream(task.number)
        del task  # drop all references while this thread waits
