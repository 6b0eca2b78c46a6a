"""The key-value store of `jax.distributed`, whose calls all end, and the texts that processes exchange in it.

JAX's client holds a lock when it finds the coordinator lost, so a call may never return.  Each thread's calls
are made by a thread of their own, for which the caller waits a limited number of polls: time is counted in
polls of this process, so that one that was stopped for a while loses nothing.
"""

from __future__ import annotations

import ctypes
import queue
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpmd import jax_compat

if TYPE_CHECKING:
    from mpmd.runtime.processes.world import World


_POLL_SECONDS = 0.2


class NoAnswer(Exception):
    """The store did not answer in time."""


class _Call:
    """A call of the store, and where its result or exception arrives."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()


class _Caller:
    """A thread that makes calls, one after the other."""

    def __init__(self, polls: int, lost: threading.Event) -> None:
        self._polls, self._lost = polls, lost
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mpmd-store", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """The result of a call, or its exception.

        Raises:
            NoAnswer: it did not return in time.
        """
        pending = _Call(function)  # with an answer of its own: a signal handler may call while this waits
        self._calls.put(pending)
        for _ in range(self._polls):
            try:
                result, error = pending.answer.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._lost.is_set():  # a call of another thread found that
                    break
                continue
            if error is not None:
                raise error
            return result
        self._lost.set()
        raise NoAnswer(f"no answer for {self._polls * _POLL_SECONDS:g} s")

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(_POLL_SECONDS)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.answer.put((call.function(), None))
            except Exception as error:  # raised by the caller
                call.answer.put((None, error))


class BoundedStore:
    """The methods of JAX's client that are used here, with the same names."""

    def __init__(self, client: Any, polls: int = 15) -> None:
        """Takes JAX's client, and the polls of 0.2 s without an answer after which it has none."""
        self._client, self._polls = client, polls
        self._of_thread = threading.local()
        self._callers: list[_Caller] = []
        self._lost = threading.Event()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._call(lambda: self._client.key_value_set(key, value, allow_overwrite=allow_overwrite))

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        """All entries whose keys begin with `prefix`."""
        entries: list[tuple[str, str]] = self._call(lambda: self._client.key_value_dir_get(prefix))
        return entries

    def key_value_delete(self, key: str) -> None:
        self._call(lambda: self._client.key_value_delete(key))

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        """An entry, which may be written within so many milliseconds."""
        return str(self._call(lambda: self._client.blocking_key_value_get(key, milliseconds)))

    def close(self) -> None:
        for caller in self._callers:
            caller.close()

    def _call(self, function: Callable[[], Any]) -> Any:
        caller: _Caller | None = getattr(self._of_thread, "caller", None)
        if caller is None:
            caller = self._of_thread.caller = self._caller_of_thread()
        return caller.call(function)

    def _caller_of_thread(self) -> _Caller:
        """A thread for the calls of this one; another's, once Python ends and starts none."""
        try:
            self._callers.append(_Caller(self._polls, self._lost))
        except RuntimeError:
            if not self._callers:
                raise
        return self._callers[-1]


def delay_aborts() -> None:
    """Gives this process some seconds between a fatal error of JAX's coordination client and its end.

    The client calls `abort` as soon as it has lost the coordinator, and takes no Python callback.  The thread
    that aborts sleeps first, as many seconds as SIGABRT has for a number (6), in which Python can raise an
    exception and leave.  Nothing happens on systems without a C library of POSIX.
    """
    try:
        library = ctypes.CDLL(None)
        library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
    except (OSError, AttributeError, TypeError):
        return


_WAIT_MILLISECONDS = 200


class Mail:
    """Writes and awaits entries of the store; each wait ends when the processes cannot go on."""

    def __init__(self, world: World, store: Any) -> None:
        self._world, self._store = world, store
        self._written = ""

    def swap(self, name: str, text: str) -> list[str]:
        """Exchanges a text with all processes; all must call it, with the same names in the same order.

        Raises:
            PeerError: a process failed or ended meanwhile.
        """
        own = f"mpmd/{name}/{self._world.index}"
        with self._answering():
            self._store.key_value_set(own, text)
            texts = [self._wait_for(f"mpmd/{name}/{process}") for process in range(self._world.count)]
            if self._written:  # every process has read the entries before these
                self._store.key_value_delete(self._written)
        self._written = own
        return texts

    def put(self, name: str, text: str) -> None:
        with self._answering():
            self._store.key_value_set(f"mpmd/{name}", text)

    def take(self, name: str) -> str:
        """Waits for a text that another process puts, and removes it."""
        with self._answering():
            text = self._wait_for(f"mpmd/{name}")
            self._store.key_value_delete(f"mpmd/{name}")
        return text

    def meet(self, name: str, turn: int, others: Collection[int]) -> None:
        """Waits until other processes have come to the same turn; they call it with this one."""
        with self._answering():
            self._store.key_value_set(f"mpmd/{name}/{turn}/{self._world.index}", "")
            for process in others:
                self._wait_for(f"mpmd/{name}/{turn}/{process}")
            if turn:  # all have come to this turn, and read the entries of the one before
                self._store.key_value_delete(f"mpmd/{name}/{turn - 1}/{self._world.index}")

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (jax_compat.JaxRuntimeError, NoAnswer) as error:
            raise self._world.coordinator_lost(error) from error

    def _wait_for(self, key: str) -> str:
        with self._world.waiting():
            while True:
                self._world.check()
                try:
                    return str(self._store.blocking_key_value_get(key, _WAIT_MILLISECONDS))
                except (jax_compat.JaxRuntimeError, NoAnswer) as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise


class Turns:
    """Where some processes wait for each other, turn after turn; `WorldExchange.turns` makes it."""

    def __init__(self, meet: Callable[[str, int, Collection[int]], None], name: str, others: Collection[int]):
        """Takes a name that no others have, and the other processes."""
        self._meet, self._name, self._others, self._turn = meet, name, others, 0

    def meet(self) -> None:
        """Waits for the other processes.

        Raises:
            PeerError: a process failed or ended meanwhile.
        """
        self._meet(self._name, self._turn, self._others)
        self._turn += 1
