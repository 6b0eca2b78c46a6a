"""Runs programs: verified once, decoded once, then issued step after step.

A step returns as soon as everything is issued: its results are arrays that may still be computed, as with
`jax.jit`.  A fragment that raises when it is called ends the step with a `FragmentError` at once.  A
fragment that fails on its device makes its results, and all that is computed from them, failed arrays;
it is named by a `FragmentError` in the next step or in `synchronize`, while touching a failed array raises
JAX's own error.  `RuntimeOptions(blocking=True)` waits in every step and names it there.

Threads: one thread issues for all meshes, in the order in which everything could begin, if every call returns
before its work is done and none waits for memory; otherwise one thread per mesh, so that no mesh waits for
another's call.  Where a mesh is over several processes, a call waits for the same call of these, and where
arrays are sent directly, a send for its receive: every process issues its part of one order, from one thread,
and the user's thread is free to report a process that is lost.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from mpmd.brief import brief
from mpmd.errors import ConfigError, ProgramError, SignatureError, collect
from mpmd.runtime.channels.protocol import Stopped
from mpmd.runtime.channels.stamps import dispatch_annotations, step_annotation
from mpmd.runtime.program.order import issue_order
from mpmd.runtime.program.pairs import order_pairs
from mpmd.runtime.program.stream_memory import peak_and_freed
from mpmd.runtime.program.streams import Feed, Fetch, Program, Run
from mpmd.runtime.program.verify_streams import verify
from mpmd.runtime.run.decode import ArrayEngine, decode
from mpmd.runtime.run.host_memory import freed_memory, limit_of
from mpmd.runtime.run.interpreter import (
    BoundCall,
    BoundInstruction,
    CallFailed,
    FragmentExecutable,
    Observer,
    PendingCalls,
    StepState,
    Workers,
    issue_all,
)
from mpmd.runtime.run.observe import FiniteCheck, Observers
from mpmd.runtime.run.waiting import Exclusive, failure_of, is_finished, wait_for

_DRAIN_SECONDS = 0.4
"""Timeout for the issued work of an interrupted step."""


Issue: TypeAlias = Literal["auto", "one-thread", "thread-per-mesh"]
Transfers: TypeAlias = Literal["auto", "device_put", "server"]


@dataclasses.dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How programs are run.

    Attributes:
        issue: the threads: "one-thread", "thread-per-mesh", or "auto", the rule of this module.  A process
            that has some of a mesh over several processes cannot use a thread per mesh.
        run_ahead: the maximum of unfinished calls of a mesh; bounds how long an interrupt takes.  There are
            fewer where their results would need much more memory than the mesh is predicted to need; see
            `run_ahead`.
        blocking: wait in every step until everything is computed.
        debug_nans: wait for every fragment and raise a NonFiniteError for the first that computes a NaN.
        keep_freed_memory: on CPU, let this process keep the memory that fragments free, so that the next step
            takes no page faults.  At the beginning of a step there is kept, at most, what a step takes and
            frees again, and a quarter of its predicted peak or 256 MiB; any more is returned to the
            system every 10 s, and at once if it is twice as much.  Nothing happens with other C libraries
            than glibc (2.33 or later); see `host_memory`.
        transfers: how arrays are sent between processes: "device_put", from device to device, by NCCL on
            GPUs; "server", by JAX's transfer server; or "auto": the first for those of GPUs, one a process,
            that are of the same kind and sharded alike at both ends, the second for all others.
        peer_timeout: in several processes, seconds after which one that does not answer has failed.
    """

    issue: Issue = "auto"
    run_ahead: int = 16
    blocking: bool = False
    debug_nans: bool = False
    keep_freed_memory: bool = True
    transfers: Transfers = "auto"
    peer_timeout: float = 8.0

    __repr__ = brief

    def __post_init__(self) -> None:
        problems = []
        if self.issue not in get_args(Issue):
            problems.append(f"issue is {self.issue!r}; there are {', '.join(map(repr, get_args(Issue)))}")
        if self.transfers not in get_args(Transfers):
            there = ", ".join(map(repr, get_args(Transfers)))
            problems.append(f"transfers is {self.transfers!r}; there are {there}")
        if type(self.run_ahead) is not int or self.run_ahead < 1:
            problems.append(f"run_ahead is {self.run_ahead!r}; a mesh needs at least 1 call on its way")
        if not isinstance(self.peer_timeout, (int, float)) or not self.peer_timeout > 0:
            problems.append(f"peer_timeout is {self.peer_timeout!r}; it must be a positive number of seconds")
        if problems:
            raise collect(ConfigError, problems, "the runtime options cannot be used:")


class Executor:
    """Runs one program; use it as a context manager, or `close` it, to end its threads.

    Steps of several threads are run one after another.
    """

    __repr__ = brief

    def __init__(
        self,
        program: Program,
        executables: Mapping[tuple[str, str], FragmentExecutable],
        engine: ArrayEngine,
        options: RuntimeOptions = RuntimeOptions(),
        workspace: Mapping[tuple[str, str], int] = MappingProxyType({}),
        process: int | None = None,
    ) -> None:
        """Verifies and decodes.

        Args:
            program: the program to run.
            executables: by (mesh, name), for every pair in `program.executables` that runs here.
            engine: moves arrays: a `MeshDevices`.
            options: see RuntimeOptions.
            workspace: scratch bytes by (mesh, executable) while it runs, where known.
            process: run the streams of the process of this index only; None: all.

        Raises:
            ProgramError: the program breaks a rule, or an executable is missing.
            ConfigError: the options require threads that the program cannot have.
        """
        self.program, self.options, self.executables = program, options, executables
        self.order = verify(program)
        own = self._own = program if process is None else program.part(process)
        self._freed_memory = freed_memory() if options.keep_freed_memory else None
        if self._freed_memory is not None:
            self._freed_memory.allow(self, limit_of(*peak_and_freed(own, workspace)))
        self._decoded = decode(own, executables, engine, options.run_ahead)
        paired = engine.paired(program)
        self._pairs = order_pairs(program, self.order, paired) if paired else None
        self.pairs = [(m.channel, m.sequence) for m in self._pairs.pairs] if self._pairs else []
        self._make_channels = engine.channels(program, self.pairs)
        self._process = process
        self._has_one_order = self._needs_one_order()
        self.issues_from_one_thread = self._needs_one_thread(executables)
        if self.issues_from_one_thread:
            for pending in self._decoded.pending:
                pending.others = tuple(other for other in self._decoded.pending if other is not pending)
        self._rank = {(program.streams[s].mesh, at): k for k, (s, at) in enumerate(self.order.nodes)}
        self._forwarded = self._inputs_that_are_outputs()
        self._paths = {spec.index: spec.path for spec in program.inputs}
        feeds = (op for s in own.streams for op in s.instructions if isinstance(op, Feed))
        self._read = sorted({feed.input for feed in feeds})
        self._workers: Workers | None = None
        self._closer: weakref.finalize[Any, Executor] | None = None
        self._exclusive, self._step = Exclusive(), f"a step of {program.name!r}"
        self._closed = self._interrupted = False
        self.steps = 0
        self._frame: StepState | None = None

    def run(
        self, inputs: Sequence[Any], *, observers: Iterable[Observer] = (), one_by_one: bool = False
    ) -> list[Any]:
        """Issues one step.

        Args:
            inputs: the user's flat arguments.  Those that the program may consume are deleted afterwards.
            observers: are called for every instruction; they may make the step wait.
            one_by_one: issue everything from this thread, in spite of the options.

        Returns:
            The flat results; arrays that may still be computed.

        Raises:
            FragmentError: a fragment failed, in this step or, on its device, in the one before.
            SignatureError: the arguments do not fit the program.
            ProgramError: the executor was closed, or a signal handler or callback calls it within a step.
        """
        with self._exclusive.work(self._step):
            if self._closed:
                raise ProgramError(
                    f"program {self.program.name!r} was closed and cannot run again\n  compile the step anew"
                )
            self._check_arguments(inputs)
            observers = tuple(observers)
            if self._freed_memory is not None:
                self._freed_memory.trim(postpone=bool(observers))
            finite = [FiniteCheck()] if self.options.debug_nans else []
            watching = (*observers, *finite, *dispatch_annotations())
            frame = StepState(
                number=self.steps,
                slots=[None] * self._decoded.num_slots,
                channels=self._make_channels(),
                inputs=inputs,
                outputs=[None] * len(self.program.outputs),
                observer=Observers(watching) if watching else None,
            )
            self.steps += 1
            self._frame = frame
            try:
                with step_annotation(self.program.name, frame.number):
                    self._issue(frame, one_by_one or self.issues_from_one_thread)
                if self.options.blocking:
                    self._wait(frame)
            except CallFailed as failed:
                first = self._first_failure(failed)
                frame.forget()
                raise first.as_error(self._consumed_arguments(frame, first.number)) from first.cause
            except BaseException:  # an interrupt, or a failed transfer: all its values are dropped
                frame.stop()
                frame.forget()
                self._interrupted = True
                self._drain()
                raise
            finally:
                self._frame = None
            self._delete_donated(frame)
            return frame.outputs

    @property
    def own_program(self) -> Program:
        return self._own

    def stop(self) -> None:
        """Makes a step that another thread runs end at its next instruction."""
        if (frame := self._frame) is not None:
            frame.stop()

    def synchronize(self) -> None:
        """Waits until every issued step is computed.

        A signal handler may call it within a step: it waits for what that has issued so far.

        Raises:
            FragmentError: a fragment failed on its device.
            ProgramError: a callback of a fragment calls it while another thread is in a step.
        """
        if self._exclusive.held_below():
            for handle in [entry.handle for of in self._decoded.pending for entry in tuple(of.unfinished)]:
                wait_for(handle)  # the step itself looks at them, and forgets those that ended
            return
        with self._exclusive.work(f"waiting for {self.program.name!r}"):
            try:
                self._wait()
            except CallFailed as failed:
                first = self._first_failure(failed)
                raise first.as_error() from first.cause

    def close(self) -> None:
        """Ends the threads.  The executor cannot run again; results stay valid."""
        with self._exclusive.work(f"closing {self.program.name!r}"):
            self._closed = True
            if self._closer is not None:
                self._closer()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_arguments(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != len(self.program.inputs):
            raise SignatureError(
                f"got {len(inputs)} arguments, compiled for {len(self.program.inputs)}\n"
                "  arguments are flat here: all leaves of the user's pytrees, in order"
            )
        deleted = [k for k in self._read if _is_deleted(inputs[k])]
        if deleted:
            raise SignatureError(
                f"deleted before the step: {self._named(deleted)}\n"
                f"  they were donated to an earlier step, or share memory with donated arrays\n"
                f"  use the results of that step, donate a copy, or do not donate them"
            )
        if not self.program.donated_inputs or len({*map(id, inputs)}) == len(inputs):
            return
        paths = self._paths
        for k in self.program.donated_inputs:
            twins = [j for j, other in enumerate(inputs) if other is inputs[k] and j != k]
            if twins and _has_data(inputs[k]):
                raise SignatureError(
                    f"arguments {paths[k]} and {paths[twins[0]]} are one array, and {paths[k]} is donated; "
                    f"pass a copy"
                )

    def _needs_one_order(self) -> bool:
        meshes = [stream.mesh for stream in self._own.streams if len(stream.processes) > 1]
        if len(self._own.streams) > 1 and self.options.issue == "thread-per-mesh" and (meshes or self._pairs):
            which = f"mesh {meshes[0]!r} is over several processes" if meshes else "arrays are sent directly"
            what = "their calls" if meshes else "all sends and receives"
            raise ConfigError(
                f"issue is 'thread-per-mesh', but {which}, and processes must issue {what} in one order\n"
                "  use 'auto' or 'one-thread'"
            )
        return bool(meshes or self._pairs)

    def _needs_one_thread(self, executables: Mapping[tuple[str, str], FragmentExecutable]) -> bool:
        if self._has_one_order:
            return True
        if self.options.issue != "auto":
            return self.options.issue == "one-thread"
        if len(self._own.streams) == 1:
            return True
        calls = (i for stream in self._decoded.streams for i in stream if isinstance(i, BoundCall))
        if any(call.unfinished < self.options.run_ahead for call in calls):
            return False
        return all(getattr(executables[e], "asynchronous", True) for e in self._own.executables)

    @functools.cached_property
    def moved_results(self) -> tuple[int, ...]:
        """The results that no call here computes: they were received, copied, or given as arguments."""
        moved = set[int]()
        for stream in self._own.streams:
            runs = (op for op in stream.instructions if isinstance(op, Run))
            called = {buffer for run in runs for buffer in run.outputs}
            fetches = (op for op in stream.instructions if isinstance(op, Fetch))
            moved.update(op.output for op in fetches if op.buffer not in called)
        return tuple(sorted(moved))

    @functools.cached_property
    def _issue_order(self) -> tuple[BoundInstruction, ...]:
        """All streams as one, for one thread."""
        bound = {(i.mesh, i.at): i for stream in self._decoded.streams for i in stream}
        if self._pairs is not None:
            nodes = list(self._pairs.issued.get(self._process or 0, ()))
        else:
            nodes = issue_order(self.program, self.order)
        keys = [(self.program.streams[s].mesh, at) for s, at in nodes]
        return tuple(bound[key] for key in keys if key in bound)

    def _inputs_that_are_outputs(self) -> frozenset[int]:
        """Arguments that are results themselves: they must outlive the step although they are donated."""
        forwarded = set()
        for stream in self._own.streams:
            fed = {op.buffer: op.input for op in stream.instructions if isinstance(op, Feed)}
            forwarded |= {
                fed[o.buffer] for o in stream.instructions if isinstance(o, Fetch) and o.buffer in fed
            }
        return frozenset(forwarded)

    def _settle(self) -> None:
        """Lets threads end an interrupted step, and checks calls that ended since the last step."""
        if self._interrupted:
            if self._workers is not None:
                self._workers.wait()
            self._forget()
            self._interrupted = False
        for pending in self._decoded.pending:
            pending.forget_finished()

    def _issue(self, frame: StepState, one_thread: bool) -> None:
        self._settle()
        if self._has_one_order:
            self._use_threads(["all meshes"]).issue([(*self._decoded.feeds, *self._issue_order)], frame)
            return
        issue_all(self._decoded.feeds, frame)
        if one_thread:
            issue_all(self._issue_order, frame)
            return
        self._use_threads([stream.mesh for stream in self._own.streams]).issue(self._decoded.streams, frame)

    def _use_threads(self, names: Sequence[str]) -> Workers:
        if self._workers is None:
            self._workers = Workers(names)
            self._closer = weakref.finalize(self, self._workers.close)
        return self._workers

    def _wait(self, frame: StepState | None = None) -> None:
        """Waits for every unfinished call, and for the results of a step; signals are handled at once.

        Raises:
            Stopped: the step was stopped meanwhile: a call may wait for another process for ever.
        """

        def check() -> None:
            if frame is not None and frame.stopped:
                raise Stopped

        def look(pending: PendingCalls) -> None:
            check()
            pending.forget_finished()

        self._settle()
        for pending in self._decoded.pending:
            while pending.unfinished:
                last, first = pending.unfinished[-1], pending.unfinished[0]
                wait_for(last.handle, functools.partial(look, pending))  # one wait: calls end in order
                wait_for(first.handle, check)  # unless it is unknown when the last one ends
                pending.forget_finished()
        if frame is None:
            return
        for result in (frame.outputs[k] for k in self.moved_results):
            if result is not None:
                wait_for(result, check)

    def _first_failure(self, failed: CallFailed) -> CallFailed:
        """The call that failed first; the one found may only have read its results.  Forgets all calls."""
        failures = [failed]
        for pending in self._decoded.pending:
            for entry in pending.unfinished:
                if not entry.handle.is_deleted() and entry.handle.is_ready():
                    cause = failure_of(entry.handle)
                    if cause is not None:
                        failures.append(CallFailed(entry.call, entry.number, cause))
        self._forget()
        first = min(failures, key=lambda f: (f.number, self._rank[f.call.mesh, f.call.at]))
        first.position = self._rank[first.call.mesh, first.call.at]
        return first

    def _consumed_arguments(self, frame: StepState, failed: int) -> str:
        if failed != frame.number:
            return "the results of that step have no value; continue from a checkpoint"
        if not self.program.donated_inputs:
            return ""
        gone = [k for k in self.program.donated_inputs if _is_deleted(frame.inputs[k])]
        if not gone:
            return "no argument was consumed: the step can be repeated with the same arguments"
        return f"consumed and gone: {self._named(gone)}; continue from a checkpoint"

    def _named(self, arguments: Sequence[int]) -> str:
        more = f" and {len(arguments) - 3} more" if len(arguments) > 3 else ""
        return ", ".join(self._paths[k] for k in arguments[:3]) + more

    def _drain(self) -> None:
        """Waits a moment for the issued work; threads may still be busy with one call each."""
        until = time.monotonic() + _DRAIN_SECONDS
        for pending in self._decoded.pending:
            for entry in tuple(pending.unfinished):
                while not is_finished(entry.handle) and time.monotonic() < until:
                    time.sleep(1e-3)

    def _forget(self) -> None:
        for pending in self._decoded.pending:
            pending.unfinished.clear()

    def _delete_donated(self, frame: StepState) -> None:
        """Deletes the donated arguments that no fragment consumed, but those without data in this process."""
        for k in self.program.donated_inputs:
            if k not in self._forwarded and _has_data(frame.inputs[k]):
                frame.inputs[k].delete()


def _is_deleted(value: Any) -> bool:
    """Whether `value` is an array that was consumed; host arrays never are."""
    check = getattr(value, "is_deleted", None)
    return check is not None and bool(check())


def _has_data(value: Any) -> bool:
    """Whether `value` is an array with data in this process: neither consumed nor of other processes only."""
    if not hasattr(value, "delete") or value.is_deleted():
        return False
    return bool(getattr(getattr(value, "sharding", None), "has_addressable_devices", True))
