"""Output of several processes as that of one: lines that begin with the number of the process."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected")
_LINE_BYTES = 64 << 10
"""Longer lines are printed as several: a process that writes no end of a line takes no more memory."""
_IDLE_SECONDS = 1.0
"""How long the end of a pipe is waited for once the process has ended: its own children may hold it."""
_POLL_SECONDS = 0.02


class Printer:
    """Writes whole lines of many threads.

    Attributes:
        failure: why nothing can be written any more; what comes then is read and dropped, so that no process
            waits for it.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None
        self._lock = threading.Lock()

    def print(self, line: bytes, file: int) -> None:
        """Writes a line to a descriptor; waits for its reader."""
        with self._lock:
            left = memoryview(line)
            while left and self.failure is None:
                try:
                    left = left[os.write(file, left) :]
                except BlockingIOError:  # another program has made it so
                    select.select([], [file], [], _IDLE_SECONDS)
                except OSError as error:
                    self.failure = error


class Reader(threading.Thread):
    """Passes on what a process writes to one of its pipes."""

    def __init__(self, source: IO[bytes], target: int, index: int, printer: Printer) -> None:
        """Takes the pipe, the descriptor to write to, and the number of the process."""
        super().__init__(name=f"mpmd-output-{index}", daemon=True)
        self._source, self._target, self._printer = source, target, printer
        self._prefix = f"[{index}] ".encode()
        self.read_at, self.prints = time.monotonic(), False

    def run(self) -> None:
        """Until the end of the pipe."""
        while line := self._source.readline(_LINE_BYTES):
            if not _NOISE.match(line):
                self.prints = True
                end = b"" if line.endswith(b"\n") else b"\n"
                self._printer.print(self._prefix + line + end, self._target)
            self.read_at, self.prints = time.monotonic(), False

    def is_idle(self) -> bool:
        """Whether it has waited for a process for some time."""
        return not self.prints and time.monotonic() - self.read_at > _IDLE_SECONDS


def wait_for_output(readers: Sequence[Reader], hurried: Callable[[], bool]) -> None:
    """Returns when everything that ended processes have written is printed, or `hurried()` holds."""
    start = time.monotonic()
    for reader in readers:
        reader.read_at = max(reader.read_at, start)
    while not hurried() and any(reader.is_alive() and not reader.is_idle() for reader in readers):
        time.sleep(_POLL_SECONDS)


def open_standard_files() -> None:
    """Gives this program a standard input, output and error if it was started without.

    The next file or socket that is opened would get that number, and all that is printed.
    """
    with contextlib.suppress(OSError):
        while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(file, True)
        os.close(file)
