"""What all processes do at the same time with files, and what fails in all if it fails in one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mpmd.api.checkpoints import files
from mpmd.errors import CheckpointError
from mpmd.runtime.processes.exchange import Alike, WorldExchange
from mpmd.runtime.processes.world import world

T = TypeVar("T")


class Processes:
    """Work that all processes do at the same time, and that fails in all if it fails in one."""

    def __init__(self, exchange: WorldExchange | None) -> None:
        self._exchange = exchange

    def do(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """What `act` returns in every process, through JSON.

        Args:
            what: is done, for messages: `write a checkpoint to ...`.
            act: the work of this process.

        Raises:
            CheckpointError: it failed in another process; or here, at a file.
            PeerError: another process failed meanwhile.
        """

        def of_files() -> Any:
            try:
                return act()
            except CheckpointError:
                raise
            except files.FILE_ERRORS as error:
                raise CheckpointError(f"cannot {what}: {files.reason(error)}") from error

        if self._exchange is None:
            return [json.loads(json.dumps(of_files()))]
        return self._exchange.together(of_files, CheckpointError)

    def alike(self, act: Callable[[], T]) -> T:
        """What `act` returns, which does the same in all processes, errors included."""
        try:
            return act()
        except CheckpointError:
            if self._exchange is not None:
                self._exchange.settled = True
            raise

    def compare(self, alike: Alike) -> None:
        """Raises a PeerError if something differs that must be equal in all processes."""
        if self._exchange is not None:
            self._exchange.compare(alike)


@contextlib.contextmanager
def all_processes(name: str) -> Iterator[Processes]:
    """The processes in one exchange of this name; in one process there is none."""
    joined = world()
    if joined is None:
        yield Processes(None)
        return
    with joined.exchange(name) as exchange:
        yield Processes(exchange)
