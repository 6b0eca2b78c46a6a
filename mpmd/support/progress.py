"""The progress of long work, on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

_FIRST_SECONDS, _SECONDS = 0.5, 0.1
"""Before the line is first shown, and between two changes of it: short work shows nothing."""
_BAR = 24


class ProgressLine:
    """A line on the terminal that is overwritten as work is done, and removed at its end.

    Nothing is written where stderr is not a terminal.  Several threads may report.
    """

    def __init__(self, label: str) -> None:
        """Takes the begin of the line: the kind of work."""
        self._label = label
        self._is_shown = sys.stderr.isatty()
        self._next = time.monotonic() + _FIRST_SECONDS
        self._lock = threading.Lock()
        self._dirty = False

    def show(self, text: str, done: int = 0, total: int = 0) -> None:
        if not self._is_shown:
            return
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return
            self._next, self._dirty = now + _SECONDS, True
            full = _BAR * done // total if total else 0
            bar = f"[{'█' * full}{'·' * (_BAR - full)}] {done} of {total}  " if total else ""
            sys.stderr.write(f"\r\x1b[K{self._label}: {bar}{text}")
            sys.stderr.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._dirty:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._is_shown = False
