"""Errors of mesh inference, up to a limit."""

from __future__ import annotations

from mpmd import ir
from mpmd.errors import ConfigError
from mpmd.support import diagnostics


class Limited:
    """Reports errors until there are `limit` of them; -1: all."""

    def __init__(self, limit: int) -> None:
        if limit == 0 or limit < -1:
            raise ConfigError(f"error-limit={limit}: must be positive, or -1 for all errors")
        self._limit = limit
        self.count = 0

    @property
    def reached(self) -> bool:
        """Whether no more errors are reported."""
        return self.count == self._limit

    def report(self, message: str, location: ir.Location) -> None:
        """Reports an error, unless there were enough."""
        if not self.reached:
            self.count += 1
            diagnostics.error(message, location)
