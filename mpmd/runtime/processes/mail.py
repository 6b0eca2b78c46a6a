"""Texts between processes, in the key-value store: what an `WorldExchange` and a `Meeting` consist of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpmd import jax_compat
from mpmd.runtime.processes.store import NoAnswer

if TYPE_CHECKING:
    from mpmd.runtime.processes.world import World

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
            found = [self._wait_for(f"mpmd/{name}/{process}") for process in range(self._world.count)]
            if self._written:  # every process has read the entries before these
                self._store.key_value_delete(self._written)
        self._written = own
        return found

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
