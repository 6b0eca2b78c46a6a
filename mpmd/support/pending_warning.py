"""Warnings that reach the user once, even if a filter ignored them first.

`warnings.warn` loses a warning for good where a filter ignores it at that moment, and where the same text was
issued before at the same line of this package.
"""

from __future__ import annotations

import threading
import warnings

from mpmd.support.user_warnings import place_of, user_frame


class PendingWarning:
    """A `UserWarning` that is issued once: at the first `show` at which no filter ignores it.

    Args:
        text: its text; "" for no warning.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.waits = bool(text)
        self._lock = threading.Lock()

    def show(self) -> None:
        """Issue the warning, at the line outside of this package that calls it, unless it was issued before.

        Raises:
            UserWarning: a filter turns warnings into errors.
        """
        if not self.waits:
            return
        file, line, module = place_of(user_frame())
        with self._lock:
            if not self.waits or _ignored(self.text, module, line):
                return
            self.waits = False
        # a registry of its own: other programs with the same text do not silence this one
        warnings.warn_explicit(self.text, UserWarning, file, line, module, registry={})


def _ignored(text: str, module: str, line: int) -> bool:
    """Whether the first filter that matches such a warning ignores it."""
    for action, message, category, where, at in warnings.filters:
        fits = (message is None or _matches(message, text)) and issubclass(UserWarning, category)
        if fits and (where is None or _matches(where, module)) and at in (0, line):
            return action == "ignore"
    return False


def _matches(pattern: object, text: str) -> bool:
    """Whether a filter's pattern, a compiled one or a text, matches."""
    return pattern == text if isinstance(pattern, str) else pattern.match(text) is not None  # type: ignore[attr-defined]
