"""Programs in memory: loaded once for each name, unloaded when neither Python nor XLA needs them."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mpmd.compile.backends.ffi.custom_call import (
    DeviceHandlers,
    add_program,
    is_called,
    remove_program,
)
from mpmd.support.garbage import keep_past_exit, release

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class ProgramLoad(Generic[P]):
    """What loading a program gives.

    Attributes:
        handler: the address of its handler, or one for each of its devices.
        program: the program, of its index among its platform's.
        owned: code and memory of the program; it is dropped when the program is unloaded, and not at exit:
            calls that were issued may begin after Python's end.
    """

    handler: int | DeviceHandlers
    program: Callable[[int], P]
    owned: Any


class LoadedPrograms(Generic[P]):
    """The programs of one target.

    Args:
        platform: of JAX, that calls them.
    """

    def __init__(self, platform: str = "cpu") -> None:
        self.platform = platform
        self._lock = threading.Lock()
        self._programs: weakref.WeakValueDictionary[str, P] = weakref.WeakValueDictionary()
        self._retired: list[tuple[int, Any]] = []
        """Programs that nothing refers to: index and what it owns.  XLA may still call some."""

    def named(self, name: str, load: Callable[[], ProgramLoad[P]]) -> P:
        """The program of that name, which `load` loads if it is new."""
        with self._lock:
            self._unload()
            found = self._programs.get(name)
            if found is not None:
                return found
            made = load()
            index = add_program(made.handler, self.platform)
            owned = made.owned, made.handler
            keep_past_exit(owned)
            program = self._programs[name] = made.program(index)
            weakref.finalize(program, self._retire, index, owned).atexit = False
            return program

    def _retire(self, index: int, owned: Any) -> None:
        """Called when the last reference to a program goes, at any point of any thread: waits for no lock."""
        self._retired.append((index, owned))
        if self._lock.acquire(blocking=False):
            try:
                self._unload()
            finally:
                self._lock.release()

    def _unload(self) -> None:
        """Unloads the programs that nothing refers to and no executable calls; under the lock."""
        for _ in range(len(self._retired)):
            index, owned = self._retired.pop(0)
            if is_called(index, self.platform):
                self._retired.append((index, owned))
            else:
                remove_program(index, self.platform)
                release(owned)
