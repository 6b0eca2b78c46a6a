"""Python warnings at the line of the user's code that called into this package."""

from __future__ import annotations

import contextlib
import sys
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
    """File, line and module that a frame executes."""
    return frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__", "<unknown>"))
