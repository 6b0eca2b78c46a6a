"""Places in the user's code, and reports in the user's terms."""

from __future__ import annotations

import dataclasses
import linecache
import re
import traceback
from collections.abc import Iterable
from pathlib import Path


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
    found = dict.fromkeys(
        Frame(function, file, int(line))
        for function, file, line in _FRAME.findall(str(getattr(place, "location", place)))
        if file != "-" and not file.startswith((_PACKAGE, "<frozen "))
    )
    return _users(found)


def raised_at(error: BaseException) -> Frame | None:
    """Where the user's code called what raised an error; None if it is not in the user's code."""
    calls = reversed(traceback.extract_tb(error.__traceback__))
    called = [Frame(call.name, call.filename, call.lineno or 0) for call in calls]
    return next(iter(_users([f for f in called if not f.file.startswith(_PACKAGE)])), None)


def _users(frames: Iterable[Frame]) -> list[Frame]:
    """The frames outside of installed packages; if there are none, those outside of JAX."""
    own = [frame for frame in frames if not _INSTALLED & set(Path(frame.file).parts)]
    return own or [frame for frame in frames if not {"jax", "jaxlib"} & set(Path(frame.file).parts)]


_INSTALLED = {"site-packages", "dist-packages"}


_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)')


def location_of(place: object) -> tuple[str, int, int] | None:
    """File, line and column of an MLIR location (or of the op or value there); the innermost call's first."""
    location = getattr(place, "location", place)
    found = _FILE.search(str(location))
    return (found[1], int(found[2]), int(found[3])) if found else None


_SHARDING = re.compile(r"#sdy\.sharding<@\w+, \[((?:\{[^}]*\}(?:p\d+)?(?:, )?)*)\](, [^>]*)?>")
_TENSOR = re.compile(r"(?:tensor)?<((?:\d+x)*)(complex<f32>|complex<f64>|(?:b?f|[su]?i)\d\w*)>")
_COMPLEX = {"complex<f32>": "c64", "complex<f64>": "c128"}
_LOCATION = re.compile(r"\bloc\(")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')


def readable(text: str) -> str:
    """The text with shardings, types and locations in the user's terms."""
    text = _SHARDING.sub(lambda found: _spec(found[1]) + (found[2] or ""), _with_places(text))
    return _TENSOR.sub(_shape, text)


def _shape(found: re.Match[str]) -> str:
    return f"{_COMPLEX.get(found[2], found[2])}[{found[1].replace('x', ',').removesuffix(',')}]"


def _spec(dims: str) -> str:
    """The `PartitionSpec` of the dims of a sharding."""
    entries = []
    for dim in re.findall(r"\{([^}]*)\}", dims):
        names = re.findall(r'"([^"]*)"', dim)
        entries.append(None if not names else names[0] if len(names) == 1 else tuple(names))
    return f"P({', '.join(map(repr, entries))})"


def _with_places(text: str) -> str:
    """The text with the innermost place in the user's code, or the name, that each MLIR location holds."""
    found, end = [], 0
    for start in (m.start() for m in _LOCATION.finditer(text)):
        if start >= end:
            found.append(text[end:start])
            end = _end_of_location(text, start + len("loc("))
            found.append(_place(text[start:end]))
    return "".join(found) + text[end:]


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
