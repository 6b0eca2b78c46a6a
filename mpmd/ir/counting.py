"""Counts the edits of each thread, so that the caller of a pass knows whether it changed anything."""

import threading

_count = threading.local()


def note_edit() -> None:
    """Called by every function of `mpmd.ir` that changes a program."""
    _count.edits = edits() + 1


def edits() -> int:
    """Edits made so far by this thread; compare two readings."""
    return getattr(_count, "edits", 0)


def forget_edits(since: int) -> None:
    """Discards the edits since `edits()` returned `since`: they have undone each other."""
    _count.edits = since
