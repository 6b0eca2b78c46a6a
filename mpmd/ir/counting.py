"""Counts edits, so that the caller of a pass knows whether it changed anything."""

_edits = 0


def note_edit() -> None:
    """Called by every function of `mpmd.ir` that changes a program."""
    global _edits
    _edits += 1


def edits() -> int:
    """Edits made so far in this process; compare two readings."""
    return _edits


def forget_edits(since: int) -> None:
    """Discards the edits since `edits()` returned `since`: they have undone each other."""
    global _edits
    _edits = since
