"""Diagnostics of passes about a program: errors, warnings and remarks, collected.

A pass reports and continues; its caller decides how to handle the reports.

    with collecting() as found:
        pass_.run(module)
    found.raise_if_errors()
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

from mpmd.errors import PassError


class Severity(enum.Enum):
    """Severity of a finding.

    `ERROR` ends the pipeline after the pass that reported it.  `LATE_ERROR` lets the pipeline go on and
    fails it at its end.  `WARNING` reaches the user.  `NOTICE` is kept with the lowered program.
    """

    ERROR = "error"
    LATE_ERROR = "late error"
    WARNING = "warning"
    NOTICE = "notice"

    @property
    def is_error(self) -> bool:
        """Whether the program cannot be used."""
        return self in (Severity.ERROR, Severity.LATE_ERROR)


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One finding at one place.  `location` is a location of the IR; it prints."""

    severity: Severity
    message: str
    location: Any = None

    def __str__(self) -> str:
        where = "" if self.location is None else f"{self.location}: "
        return f"{where}{self.severity.value}: {self.message}"


class Diagnostics(list[Diagnostic]):
    """All findings of a run, in order."""

    @property
    def errors(self) -> list[Diagnostic]:
        return [d for d in self if d.severity.is_error]

    def of(self, severity: Severity) -> list[Diagnostic]:
        return [d for d in self if d.severity is severity]

    def raise_if_errors(self) -> None:
        """Raises one `PassError` that holds every error found.

        Raises:
            PassError: if there is at least one error.
        """
        messages = list(dict.fromkeys(d.message for d in self.errors))  # microbatches repeat them
        if not messages:
            return
        if len(messages) == 1:
            text = messages[0]
        else:
            indented = [message.replace("\n", "\n     ") for message in messages]
            listed = [f"  {n}. {message}" for n, message in enumerate(indented, 1)]
            text = "\n".join([f"{len(messages)} errors:", *listed])
        raise PassError(text, tuple(self))


_current: contextvars.ContextVar[Diagnostics | None] = contextvars.ContextVar("diagnostics", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[Diagnostics]:
    """Collects the reports inside.  Nested collections also pass their findings to the outer one."""
    outer = _current.get()
    collected = Diagnostics()
    token = _current.set(collected)
    try:
        yield collected
    finally:
        _current.reset(token)
        if outer is not None:
            outer.extend(collected)


def report(severity: Severity, message: str, location: Any = None) -> None:
    """Adds a finding to the current collection.

    Raises:
        PassError: if there is no collection and it is an error, so that no error is ever lost.
    """
    diagnostic = Diagnostic(severity, message, location)
    collected = _current.get()
    if collected is not None:
        collected.append(diagnostic)
    elif severity.is_error:
        raise PassError(str(diagnostic), (diagnostic,))


def error(message: str, location: Any = None) -> None:
    """Reports that the program is wrong; the pipeline stops after this pass."""
    report(Severity.ERROR, message, location)


def late_error(message: str, location: Any = None) -> None:
    """Reports that the program is wrong, in a way that lets the rest of the pipeline run."""
    report(Severity.LATE_ERROR, message, location)


def warning(message: str, location: Any = None) -> None:
    report(Severity.WARNING, message, location)


def notice(message: str, location: Any = None) -> None:
    """Reports a remark that explains a result; kept, not shown by default."""
    report(Severity.NOTICE, message, location)
