"""Python warnings at the line of the user's code that called into this package."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

_OURS = str(Path(__file__).parents[1]), contextlib.__file__
"""Where frames are not the user's: context managers as decorators call through `contextlib`."""


def warn_user(texts: Iterable[str]) -> None:
    """Issues each text once, as a `UserWarning` at the innermost caller outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    for text in dict.fromkeys(texts):
        warnings.warn(text, stacklevel=level)
