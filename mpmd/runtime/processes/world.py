"""This process among the others of a program: the key-value store of `jax.distributed`, and what happened.

The store carries control only, never arrays.  Each process writes under its own index; a failure is written
once, by the first process that knows its cause, and read by all.

An array of another process has no data here, and often the shape, the dtype and the mesh of others.  So the
origin of each array is recorded, and two processes that fetch one array each must mean the same one.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpmd import jax_compat, jax_distributed
from mpmd.brief import brief
from mpmd.errors import ConfigError, PeerError
from mpmd.runtime.processes.exchange import Alike, WorldExchange
from mpmd.runtime.processes.store import BoundedStore, Mail, NoAnswer, delay_aborts
from mpmd.runtime.run.waiting import Exclusive, ExclusiveWork
from mpmd.support.resources import once

_RECORDED = 16
"""Calls whose results are known; earlier results are compared by shape, dtype and place only."""

log = logging.getLogger("mpmd.processes")


class Origins:
    """The last calls that made arrays, in every process the same; holds none of them."""

    def __init__(self) -> None:
        self._calls: deque[tuple[str, list[weakref.ref[Any] | None]]] = deque(maxlen=_RECORDED)

    def record(self, what: str, leaves: Sequence[Any]) -> None:
        """Notes the results of a call: `what`, such as `program 3`, and its leaves in order."""
        self._calls.append((what, [_reference(leaf) for leaf in leaves]))

    def of(self, leaf: Any) -> list[str]:
        """The calls that gave an array, and which of their results it is; none if that is not known.

        There are several for an array that is two results, or an argument that is a result.
        """
        return list(self._found(leaf))

    def _found(self, leaf: Any) -> Iterator[str]:
        for what, references in reversed(self._calls):
            for k, reference in enumerate(references):
                if reference is not None and reference() is leaf:
                    yield f"result {k} of {what}"


def differ(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the origins of arrays are known, and none is common to both."""
    return bool(one and other) and not set(one) & set(other)


def _reference(leaf: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(leaf)
    except TypeError:  # a number
        return None


_STATE = "mpmd/state/"
_CAUSE_SECONDS = 5.0
"""How long the cause of a failure is waited for, beyond the time after which a process is silent."""
_COMPARED = 32
"""Steps and exchanges whose order is compared: no process is ahead of another by more."""
_COORDINATOR_SECONDS = 0.2
"""How long the process that runs the coordinator outlives the others: JAX ends those that lose it."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why the processes cannot go on.

    Attributes:
        process: index of the process in which it began.
        text: what happened there.
        mesh: where, if a fragment failed; "" else.
        known: whether that process knows of it, and raises an error of its own.
        where: what it is, if it is not in a process.
    """

    process: int
    text: str
    mesh: str = ""
    known: bool = True
    where: str = ""


class World:
    """The processes of a program.

    Attributes:
        index, count: this process's index, and how many there are.
        failure: why they cannot go on; None while they can.
        meshes: the meshes of each process, for messages.
        completed: how many steps this process has completed.
        turns: how many steps and exchanges it has completed.
        waits: whether it runs a step or waits for others now.
        exit_code: of this process, if it has failed.
        peer_timeout: seconds after which a process that does not answer has failed.
        cores: on which this process runs from `pin` on; empty for all.
        begun: the last steps and exchanges that this process began, and how many there were before them.
        raised: set when another thread than the watching one raises a PeerError.
        watcher: the watching thread.
        origins: where arrays come from.
    """

    __repr__ = brief

    def __init__(self, store: Any, index: int, count: int) -> None:
        self.store, self.index, self.count = store, index, count
        self.failure: Failure | None = None
        self.meshes: dict[int, list[str]] = {}
        self.completed, self.turns, self.waits, self.peer_timeout = 0, 0, False, 8.0
        self.exit_code = 1
        self.hosts: dict[int, str] = {index: socket.gethostname()}
        self.cores: tuple[int, ...] = ()
        self.begun: tuple[int, tuple[str, ...]] = (0, ())
        self.raised, self.watcher = threading.Event(), 0
        self._stop_work: list[Callable[[], None]] = []
        self._mail, self._numbers = Mail(self, store), itertools.count()
        self._exclusive, self.origins = Exclusive(), Origins()

    def name(self) -> str:
        return f"process {self.index} of {self.count}, host {self.hosts[self.index]!r}"

    def pin(self) -> None:
        """Keeps all threads of this process on its cores; called when JAX has created its client.

        A client that is created on one core has one thread, which a collective may hold.
        """
        if self.cores and (tasks := Path("/proc/self/task")).is_dir():
            for task in tasks.iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), self.cores)

    def on_failure(self, stop: Callable[[], None]) -> None:
        """Calls `stop`, from another thread, when the processes cannot go on."""
        self._stop_work.append(stop)

    def known_hosts(self) -> dict[int, str]:
        beats = {name: text for name, text in self.state().items() if name.startswith("beat/")}
        hosts = {int(name.removeprefix("beat/")): json.loads(text)["host"] for name, text in beats.items()}
        return {**self.hosts, **hosts}

    def publish(self, name: str, text: str, *, once: bool = False) -> None:
        """Writes an entry of the shared state; with `once` only if it is not there.

        Raises:
            PeerError: the coordinator is lost.
        """
        try:
            self.store.key_value_set(_STATE + name, text, allow_overwrite=not once)
        except (jax_compat.JaxRuntimeError, NoAnswer) as error:
            if "ALREADY_EXISTS" not in str(error):
                raise self.coordinator_lost(error) from error

    def state(self) -> dict[str, str]:
        """The shared state: `failure`, and `beat/0`, `failed/0`, `left/0` for each process."""
        try:
            entries = self.store.key_value_dir_get(_STATE)
        except (jax_compat.JaxRuntimeError, NoAnswer) as error:
            raise self.coordinator_lost(error) from error
        return {key.removeprefix(_STATE): text for key, text in entries}

    def begin(self, what: str) -> None:
        """Records that a step or an exchange begins: all processes must begin the same, in the same order."""
        before, last = self.begun
        # The last ones are enough to compare, with the number of those before them.
        surplus = max(0, len(last) + 1 - _COMPARED)
        self.begun = before + surplus, (*last[surplus:], what)

    def beat(self, turn: str) -> None:
        """Writes that this process is alive, and what it began; `turn` differs from that of the last beat."""
        beat = {"turn": turn, "host": self.hosts[self.index], "begun": self.begun}
        self.publish(f"beat/{self.index}", json.dumps(beat))

    def complete(self) -> None:
        """Counts a step that this process has completed."""
        self.completed += 1
        self.turns += 1

    @contextlib.contextmanager
    def exchange(self, what: str, alike: Alike | None = None) -> Iterator[WorldExchange]:
        """All processes share texts: the one way to do so.

        Args:
            what: its name, such as `fetch 3`; all processes must begin the same, in the same order.
            alike: what must be equal in all processes.

        Raises:
            PeerError: another process failed, ended, began something else, or does it otherwise.
            ProgramError: this thread is in a step or an exchange already.
        """
        with self.turn(what):
            self.begin(what)
            exchange = WorldExchange(self, self._mail, next(self._numbers), what)
            try:
                if alike is not None:
                    exchange.compare(alike)
                yield exchange
            except BaseException as error:
                if not exchange.settled and self.failure is None:  # the others would wait for this process
                    self.fail_here(error, what=what)
                raise
            finally:
                self.turns += 1

    def turn(self, what: str) -> ExclusiveWork:
        """A step or an exchange: one at a time, and none from a handler that interrupts another.

        Raises:
            PeerError: the processes cannot go on.
            ProgramError: this thread is in a step or an exchange already.
        """
        return self._exclusive.work(what, self.check)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While this process waits for others: one of them that has ended is missed."""
        before, self.waits = self.waits, True
        try:
            yield
        finally:
            self.waits = before

    def differ(self, process: int, text: str) -> PeerError:
        """The error of processes that do different things; ends the work of all."""
        with contextlib.suppress(PeerError):  # the coordinator is lost, which ends the work as well
            self.stop()
            self.report(Failure(process, text, known=False))
            self.fail(Failure(**json.loads(self.state()["failure"])))
        assert self.failure is not None
        return self.error(self.failure)

    def check(self) -> None:
        """Raises a PeerError if the processes cannot go on."""
        if self.failure is not None:
            raise self.error(self.failure)

    def coordinator_lost(self, error: Exception) -> PeerError:
        """The error of a store that does not answer; ends the work of this process."""
        lines = str(error).splitlines() or [""]
        where = f"the coordinator at {jax_distributed.coordinator_address()}"
        self.fail(Failure(-1, f"does not answer: {lines[0][:200]}", known=False, where=where))
        assert self.failure is not None
        return self.error(self.failure)

    def error(self, failure: Failure) -> PeerError:
        """The error of the other processes for a failure."""
        host = self.hosts.get(failure.process, "")
        of_process = self.meshes.get(failure.process, [])
        meshes = [failure.mesh] if failure.mesh else of_process
        where = [f"host {host!r}"] if host else []
        where += [f"mesh{'es' if len(meshes) > 1 else ''} {', '.join(map(repr, meshes))}"] if meshes else []
        place = f" ({', '.join(where)})" if where else ""
        last = f"step {self.completed - 1} is the last one" if self.completed else "no step is"
        what = failure.where or f"process {failure.process}{place}"
        if threading.get_ident() != self.watcher:
            self.raised.set()
        return PeerError(
            f"{what} {failure.text}\n"
            f"  {last} that process {self.index} has completed\n"
            "  the processes cannot go on: start all of them again, from a checkpoint"
        )

    def explain(self, error: Exception, mesh: str = "", position: int = 1 << 60) -> None:
        """Raises a PeerError if a failure here began in another process; waits until the cause is known.

        Args:
            error: the exception raised here.
            mesh: where, if a fragment failed.
            position: of the fragment in the order of the program: the first of several failures is the cause.

        Raises:
            PeerError: it began in another process.
        """
        if self.failure is None:
            text = self._failed(error)
            order = [self.completed, position]
            report = {"process": self.index, "text": text, "mesh": mesh, "order": order}
            self.publish(f"failed/{self.index}", json.dumps(report))
        self._wait_for_cause()
        if self.failure is not None and (self.failure.process != self.index or not self.failure.known):
            raise self.error(self.failure) from error

    def _wait_for_cause(self) -> None:
        """Waits until the watching thread knows why the processes cannot go on, for a limited time."""
        until = time.monotonic() + self.peer_timeout + _CAUSE_SECONDS
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.01)

    def _failed(self, error: BaseException, what: str = "") -> str:
        """Describes an error of this process to the others: in what, by default the step."""
        lines = (str(error).strip() or type(error).__name__).splitlines()
        shown = lines if len(lines) < 12 else [*lines[:4], "[...]", *lines[-6:]]
        return f"failed in {what or f'step {self.completed}'}:\n    " + "\n    ".join(shown)

    def fail_here(self, error: BaseException, mesh: str = "", what: str = "") -> None:
        """Ends the work of all processes: an error of this one, after which the others would wait for it."""
        with contextlib.suppress(PeerError):  # the coordinator is lost, which ends the work as well
            self.stop()
            self.report(Failure(self.index, self._failed(error, what), mesh))
            # The first failure written is the cause for all processes: read back, it may not be this one.
            self.fail(Failure(**json.loads(self.state()["failure"])))

    def fail(self, failure: Failure) -> None:
        """Ends the work of this process: called once the cause is known."""
        if self.failure is None:
            self.failure = failure
            self.stop()

    def stop(self) -> None:
        """Stops the work of this process."""
        stops, self._stop_work = self._stop_work, []
        for stop in stops:
            stop()

    def report(self, failure: Failure) -> None:
        """Writes a failure for all processes, unless there is one."""
        self.publish("failure", json.dumps(dataclasses.asdict(failure)), once=True)


@once
def world() -> World | None:
    """The processes that `jax.distributed` has joined; None if there is one.

    The first call starts a thread that watches the other processes, and registers what happens at exit.

    Raises:
        ConfigError: this version of JAX has no key-value store.
    """
    index, count = jax_distributed.place_of_process()
    if count == 1:
        return None
    from mpmd.runtime.processes.monitor import Monitor

    store = jax_distributed.coordination_client()
    if store is None:
        raise ConfigError("there are several processes, but this version of JAX hides its key-value store")
    joined = World(BoundedStore(store), index, count)
    delay_aborts()
    joined.beat("joined")
    monitor = Monitor(joined)
    monitor.start()
    atexit.register(_leave, joined, monitor.stop)
    _report_exceptions(joined)
    log.info("joined as %s", joined.name())
    return joined


def _report_exceptions(joined: World) -> None:
    """An exception that ends this process is reported to the others, and names this process."""
    show = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, PeerError) and joined.failure is None:
            lines = str(error).splitlines() or [""]
            with contextlib.suppress(PeerError):
                joined.stop()
                joined.report(Failure(joined.index, f"ended with {kind.__name__}: {lines[0]}"))
        error.add_note(f"in {joined.name()}")
        show(kind, error, trace)

    sys.excepthook = report


def _leave(joined: World, stop_watching: Callable[[], None]) -> None:
    """Waits for the other processes, which may still read sent arrays, unless one has failed."""
    with contextlib.suppress(PeerError):  # the coordinator is lost, which `failure` says too
        joined.check()
        joined.stop()
        joined.publish(f"left/{joined.index}", str(joined.turns))
        while joined.failure is None and not _all_left(joined.state(), joined.count):
            time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    stop_watching()
    if joined.failure is not None:  # JAX would wait for processes that do not answer
        if joined.index == 0:
            time.sleep(_COORDINATOR_SECONDS)
        os._exit(joined.exit_code)
    if joined.index == 0:
        time.sleep(_COORDINATOR_SECONDS)


def _all_left(state: Mapping[str, str], count: int) -> bool:
    return all(f"left/{process}" in state for process in range(count))
