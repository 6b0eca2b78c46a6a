"""Places in the user's code: of operations, in reports, and in warnings, each of which comes once."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from mpmd.brief import brief


@dataclasses.dataclass(frozen=True)
class Frame:
    """A place in the user's code: function (empty if not known), file, line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f", in {self.function}" if self.function else "")

    @property
    def source(self) -> str:
        """The text of the line; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


_FRAME = re.compile(r'(?:"((?:[^"\\]|\\.)*)"\()?"((?:[^"\\]|\\.)*)":(\d+):\d+')
_PACKAGE = str(Path(__file__).parents[1])


def frames_of(place: object) -> list[Frame]:
    """The calls that led to an op, innermost first, without those inside of JAX and of this package.

    Nor those inside of other installed packages, unless there are no others.
    """
    frames = dict.fromkeys(
        Frame(function, file, int(line))
        for function, file, line in _FRAME.findall(str(getattr(place, "location", place)))
        if file != "-" and not file.startswith((_PACKAGE, "<frozen "))
    )
    return _users(frames)


def raised_at(error: BaseException) -> Frame | None:
    """Where the user's code called what raised an error; None if it is not in the user's code."""
    calls = reversed(traceback.extract_tb(error.__traceback__))
    called = [Frame(call.name, call.filename, call.lineno or 0) for call in calls]
    return next(iter(_users([f for f in called if not f.file.startswith(_PACKAGE)])), None)


def users_place(places: Iterable[str]) -> str:
    """The first place, `file:line (function)`, in the user's code; or else outside of this package; or ""."""
    others = [place for place in places if not place.startswith(_PACKAGE)]
    own = (place for place in others if not _INSTALLED & set(Path(place.partition(":")[0]).parts))
    return next(own, next(iter(others), ""))


def _users(frames: Iterable[Frame]) -> list[Frame]:
    """The frames outside of installed packages; if there are none, those outside of JAX."""
    own = [frame for frame in frames if not _INSTALLED & set(Path(frame.file).parts)]
    return own or [frame for frame in frames if not {"jax", "jaxlib"} & set(Path(frame.file).parts)]


_INSTALLED = {"site-packages", "dist-packages"}


_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)')


def location_of(place: object) -> tuple[str, int, int] | None:
    """File, line and column of an MLIR location (or of the op or value there); the innermost call's first."""
    location = getattr(place, "location", place)
    match = _FILE.search(str(location))
    return (match[1], int(match[2]), int(match[3])) if match else None


_SHARDING = re.compile(r"#sdy\.sharding<@\w+, \[((?:\{[^}]*\}(?:p\d+)?(?:, )?)*)\](, [^>]*)?>")
_TENSOR = re.compile(r"(?:tensor)?<((?:\d+x)*)(complex<f32>|complex<f64>|(?:b?f|[su]?i)\d\w*)>")
_COMPLEX = {"complex<f32>": "c64", "complex<f64>": "c128"}
_LOCATION = re.compile(r"\bloc\(")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')


def readable(text: str) -> str:
    """The text with shardings, types and locations in the user's terms."""
    text = _SHARDING.sub(lambda match: _spec(match[1]) + (match[2] or ""), _with_places(text))
    return _TENSOR.sub(_shape, text)


def _shape(match: re.Match[str]) -> str:
    return f"{_COMPLEX.get(match[2], match[2])}[{match[1].replace('x', ',').removesuffix(',')}]"


def _spec(dims: str) -> str:
    """The `PartitionSpec` of the dims of a sharding."""
    entries = []
    for dim in re.findall(r"\{([^}]*)\}", dims):
        names = re.findall(r'"([^"]*)"', dim)
        entries.append(None if not names else names[0] if len(names) == 1 else tuple(names))
    return f"P({', '.join(map(repr, entries))})"


def _with_places(text: str) -> str:
    """The text with the innermost place in the user's code, or the name, that each MLIR location holds."""
    pieces, end = [], 0
    for start in (m.start() for m in _LOCATION.finditer(text)):
        if start >= end:
            pieces.append(text[end:start])
            end = _end_of_location(text, start + len("loc("))
            pieces.append(_place(text[start:end]))
    return "".join(pieces) + text[end:]


def _end_of_location(text: str, start: int) -> int:
    """The end of the location whose part after the first parenthesis begins at `start`."""
    depth = 1
    for token in _TOKEN.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return token.end()
    return len(text)


def _place(location: str) -> str:
    frames, name = frames_of(location), _NAME.search(location)
    return str(frames[0]) if frames else name[1] if name else "an unknown place"


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

    __repr__ = brief

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
