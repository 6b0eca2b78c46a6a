"""Worlds of several processes without any process: each is a thread, and a table is their store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mpmd.errors import MpmdError
from mpmd.jax_compat import JaxRuntimeError
from mpmd.runtime.processes.monitor import Monitor
from mpmd.runtime.processes.world import World

SECONDS = 5


class KeyValueTable:
    """The key-value store of JAX, as far as worlds use it."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.entries and not allow_overwrite:
                raise JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.entries[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.entries, milliseconds / 1000):
                raise JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.entries[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            del self.entries[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(key, text) for key, text in self.entries.items() if key.startswith(prefix)]


def in_threads(
    work: Callable[[World], Any], table: Any = None, count: int = 2, watched: bool = False
) -> list[Any]:
    """Runs `work` in worlds of one store, each in a thread: what it returned, or the text of its error.

    With `watched` each has a monitor, so that it hears of failures of the others.
    """
    store = table or KeyValueTable()
    worlds = [World(store, index, 2) for index in range(2)]
    found: dict[int, Any] = {}

    def run(index: int) -> None:
        try:
            found[index] = work(worlds[index])
        except MpmdError as error:
            found[index] = str(error)
        except Exception as error:
            found[index] = error

    monitors = [Monitor(world) for world in worlds] if watched else []
    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for each in (*monitors, *threads):
        each.start()
    for thread in threads:
        thread.join(SECONDS)
    for monitor in monitors:
        monitor.stop()
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return [found[index] for index in range(2)]
