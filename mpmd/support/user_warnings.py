"""Warnings at the line of the user's code that called into this package; each reaches the user once."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[1]), contextlib.__file__
"""Where frames are not the user's: context managers as decorators call through `contextlib`."""


def warn_user(texts: Iterable[str]) -> None:
    """Issues each text once, as a `UserWarning` at the innermost caller outside of this package."""
    frame = user_frame()
    file, line, module = place_of(frame)
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    for text in dict.fromkeys(texts):
        warnings.warn_explicit(text, UserWarning, file, line, module, registry)


def user_frame() -> FrameType:
    """The frame of the innermost caller outside of this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def place_of(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__", "<unknown>"))


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
