"""Issues instructions, in one thread or in one per mesh, which is kept from step to step.

It is independent of JAX: functions that move and compute are passed in.

A stream is decoded once into steps, which are bound to their slots in one list that all meshes share (each
uses its own slots), and to the functions that they call.  Issuing a step never waits for data, except where
the number of unfinished fragments of a mesh reaches its bound.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from mpmd.errors import FragmentError, NonFiniteError
from mpmd.runtime.channels.protocol import Channel, Stopped
from mpmd.runtime.program.streams import Run, task_text
from mpmd.runtime.run.waiting import failure_of, wait_for
from mpmd.support.execution_log import TimeLog


class FragmentExecutable(Protocol):
    """A compiled fragment: called with its arrays it returns its results, usually not ready yet.

    An optional attribute `asynchronous` says whether a call returns before the work is done; the default is
    true.  With an optional attribute `waits_for_arguments` it is called when its arrays are ready.  With an
    optional attribute `has_token` it returns, after its results, an array of one element, which is ready when
    it has ended.  With an optional attribute `timer` it writes its times itself; without it they are observed
    from outside.  With an optional attribute `immediate` it never runs on its devices: its results are ready
    when it returns.
    """

    @property
    def name(self) -> str:
        """Its name in instructions."""

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        """Runs the fragment; consumes the arrays it was compiled to consume."""


class Timer(Protocol):
    """Writes to a log when it runs, on every device of its mesh, in each execution.

    An executable may have one; several executables may have the same.
    """

    @property
    def key(self) -> int:
        """Its key in the log."""

    def write_to(self, log: TimeLog | None) -> None:
        """Writes to a log, from the next call on; None: to no log."""


class Observer(Protocol):
    """Callbacks while one step is issued; they are called by the thread that issues the mesh.

    A subclass ignores what it does not define.
    """

    def calling(self, call: BoundCall, frame: StepState) -> None:
        """A fragment is about to be called; its arguments are in the frame."""
        return

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        """A fragment was called at time `issued`, in seconds; its results are in the frame."""
        return

    def issued(self, instruction: BoundInstruction, frame: StepState) -> None:
        return


@dataclasses.dataclass(slots=True)
class StepState:
    """The state of one step of training while it is issued."""

    number: int
    slots: list[Any]
    channels: Sequence[Channel]
    inputs: Sequence[Any]
    outputs: list[Any]
    observer: Observer | None = None
    stopped: bool = False

    def stop(self) -> None:
        """Makes every thread that issues this step stop at its next instruction."""
        self.stopped = True
        for channel in self.channels:
            channel.stop()

    def forget(self) -> None:
        """Drops all buffers: a caller may store an error, which holds its frame."""
        self.slots[:] = [None] * len(self.slots)
        self.outputs[:] = [None] * len(self.outputs)


@dataclasses.dataclass(slots=True)
class Unfinished:
    """A call whose end was not observed yet: `handle` is one of its results, which no call consumes."""

    number: int
    call: BoundCall
    handle: Any


class PendingCalls:
    """The unfinished calls of one mesh, oldest first, over all steps.

    A result that is waited for is held until the end of its call is observed: a mesh may hold as many small
    results as it has unfinished calls a moment longer than its stream does.
    """

    def __init__(self, mesh: str) -> None:
        self.mesh = mesh
        self.unfinished: deque[Unfinished] = deque()
        self.others: tuple[PendingCalls, ...] = ()
        """Pending calls issued by the same thread: checked while this mesh waits."""

    def forget_finished(self) -> None:
        """Removes the oldest calls that ended without a failure.

        Raises:
            CallFailed: the oldest remaining call failed on its device.
        """
        unfinished = self.unfinished
        while unfinished:
            handle = unfinished[0].handle
            if not handle.is_deleted():  # donated by the user: its readers report a failure
                if not handle.is_ready():
                    return
                if (failure := failure_of(handle)) is not None:
                    raise CallFailed(unfinished[0].call, unfinished[0].number, failure)
            unfinished.popleft()

    def make_room(self, frame: StepState, unfinished: int) -> None:
        """Waits while so many calls have not ended; a wait lasts until more than a quarter of them have.

        Each wait takes a core from a fragment for a moment: a long queue needs few.

        Raises:
            CallFailed: a call failed on its device.
            Stopped: the step was stopped meanwhile.
        """
        self.forget_finished()
        if len(self.unfinished) < unfinished:
            return
        room = unfinished - unfinished // 4
        check = functools.partial(self.check, frame)
        check()
        while (surplus := len(self.unfinished) - room) >= 0:
            last, first = self.unfinished[surplus], self.unfinished[0]
            wait_for(last.handle, check)  # calls of a mesh end in order
            wait_for(first.handle, check)  # unless it is unknown when the last one ends
            check()

    def check(self, frame: StepState) -> None:
        """Looks at the calls that ended, also those of meshes that the same thread issues.

        Raises:
            CallFailed: a call failed on its device.
            Stopped: the step was stopped.
        """
        if frame.stopped:
            raise Stopped
        for pending in (self, *self.others):
            pending.forget_finished()

    def wait_for_arguments(self, frame: StepState, arrays: Iterable[Any]) -> None:
        """Waits until arrays are ready, or have failed; raises what `check` raises."""
        for array in arrays:
            wait_for(array, functools.partial(self.check, frame))


class CallFailed(Exception):
    """A fragment raised when it was called, or its device reported a failure."""

    def __init__(self, call: BoundCall, number: int, cause: Exception, *, called: bool = False) -> None:
        """Takes `called` for a call that raised; without it the failure was found in a result."""
        super().__init__(call, number, cause)
        self.call, self.number, self.cause, self.called = call, number, cause, called
        self.position = 0

    def as_error(self, note: str = "") -> FragmentError:
        """The error for the user: the failure, where, and why; `note` is the advice."""
        op = self.call.op
        where = ", ".join(filter(None, (f"mesh {self.call.mesh!r}", task_text(op), f"step {self.number}")))
        cause = _shortened(str(self.cause).strip()) or "no message"
        text = f"fragment {op.executable!r} failed on {where}: {type(self.cause).__name__}: {cause}"
        label = f"\n  it is: {op.label}" if op.label else ""
        unseen = ""
        if self.call.unwatched and not self.called:
            names = ", ".join(self.call.unwatched)
            unseen = f"\n  or in its inputs: {names} cannot be watched, all results are consumed"
        kind = NonFiniteError if isinstance(self.cause, FloatingPointError) else FragmentError
        error = kind(text + label + unseen + (f"\n  {note}" if note else ""))
        error.mesh, error.position = self.call.mesh, self.position
        return error


def _shortened(text: str) -> str:
    """Long causes are tracebacks in one string: the relevant lines are at both ends."""
    return text if len(text) <= 1200 else f"{text[:400]} [...] {text[-800:]}"


class BoundInstruction(Protocol):
    """An instruction bound to slots, channels and executables, so that issuing it needs no lookup."""

    mesh: str
    at: int

    def issue(self, frame: StepState) -> None:
        """Issues it."""


@dataclasses.dataclass(slots=True)
class BoundCall:
    """A `Run`.

    Attributes:
        mesh, at: its position in the program.
        op: the instruction.
        execute: the executable.
        inputs, outputs: slots of its arguments and results.
        consumed: slots that are empty after it.
        results: how many arrays a call returns: its outputs, and a token if it has one.
        handle: the result that signals the end of the call; None if all are consumed.
        unwatched: executables whose failure may only be observed here.
        pending: the pending calls of its mesh.
        unfinished: the maximum of pending calls once it is issued, itself included.
        waits_for_arguments: whether it is called when its arguments are ready.
    """

    mesh: str
    at: int
    op: Run
    execute: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    consumed: tuple[int, ...]
    results: int
    handle: int | None
    unwatched: tuple[str, ...]
    pending: PendingCalls
    unfinished: int
    waits_for_arguments: bool = False

    def issue(self, frame: StepState) -> None:
        """Calls the executable and stores its results; adds the call to the pending ones."""
        pending, slots = self.pending, frame.slots
        if pending.unfinished:
            pending.make_room(frame, self.unfinished)
        if self.waits_for_arguments:
            pending.wait_for_arguments(frame, [slots[i] for i in self.inputs])
        observer, issued = frame.observer, 0.0
        if observer is not None:
            observer.calling(self, frame)
            issued = time.perf_counter()
        try:
            results = self.execute(*[slots[i] for i in self.inputs])
        except Exception as cause:  # all exceptions of an executable are reported to the user
            raise CallFailed(self, frame.number, cause, called=True) from cause
        if len(results) != self.results:
            wrong = TypeError(f"returned {len(results)} arrays, {self.results} expected")
            raise CallFailed(self, frame.number, wrong, called=True)
        for i in self.consumed:
            slots[i] = None
        for i, array in zip(self.outputs, results):
            slots[i] = array
        if self.handle is not None:
            pending.unfinished.append(Unfinished(frame.number, self, results[self.handle]))
        if observer is not None:
            observer.ran(self, frame, issued)


@dataclasses.dataclass(slots=True)
class BoundSend:
    """A `Send`."""

    mesh: str
    at: int
    buffer: int
    channel: int
    sequence: int

    def issue(self, frame: StepState) -> None:
        frame.channels[self.channel].send(self.sequence, frame.slots[self.buffer])


@dataclasses.dataclass(slots=True)
class BoundRecv:
    """A `Recv`."""

    mesh: str
    at: int
    buffer: int
    channel: int
    sequence: int

    def issue(self, frame: StepState) -> None:
        frame.slots[self.buffer] = frame.channels[self.channel].recv(self.sequence)


@dataclasses.dataclass(slots=True)
class BoundCopy:
    """A `Copy`."""

    mesh: str
    at: int
    source: int
    buffer: int
    copy: Callable[[Any], Any]

    def issue(self, frame: StepState) -> None:
        """Starts the copy."""
        frame.slots[self.buffer] = self.copy(frame.slots[self.source])


@dataclasses.dataclass(slots=True)
class BoundFree:
    """A `Free`."""

    mesh: str
    at: int
    buffers: tuple[int, ...]

    def issue(self, frame: StepState) -> None:
        slots = frame.slots
        for i in self.buffers:
            slots[i] = None


@dataclasses.dataclass(slots=True)
class BoundFeed:
    """A `Feed`."""

    mesh: str
    at: int
    buffer: int
    input: int
    place: Callable[[Any], Any]
    path: str

    def issue(self, frame: StepState) -> None:
        frame.slots[self.buffer] = self.place(frame.inputs[self.input])


@dataclasses.dataclass(slots=True)
class BoundFetch:
    """A `Fetch`."""

    mesh: str
    at: int
    buffer: int
    output: int

    def issue(self, frame: StepState) -> None:
        frame.outputs[self.output] = frame.slots[self.buffer]


def issue_all(instructions: Iterable[BoundInstruction], frame: StepState) -> None:
    """Issues the instructions in order.

    Raises:
        CallFailed: a fragment failed, now or earlier.
        Stopped: the frame was stopped by another thread.
    """
    observer = frame.observer
    for instruction in instructions:
        if frame.stopped:
            raise Stopped
        instruction.issue(frame)
        if observer is not None:
            observer.issued(instruction, frame)


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
