"""What objects print: a `repr` of a few lines that says what they are, however much they hold.

`str` and `as_text` are the long forms.  In a notebook the same lines are above a picture.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import itertools
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import PurePath
from typing import Any, TypeVar

MAX_LINES, MAX_COLUMNS = 10, 120
"""Bounds of each `repr`."""
_MAX_FIELD = 110
_MAX_NAMES = 6

_WITH_ADDRESS: Any = object.__repr__

K = TypeVar("K")
V = TypeVar("V")


class _Shortener(reprlib.Repr):
    """Values of fields: a few entries of a container, and the type of what could print anything."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 3
        self.maxstring, self.maxother = 60, 80
        self.fillvalue = "…"

    def repr_instance(self, x: Any, level: int) -> str:
        kind = type(x)
        if kind is bytes:
            return f"<{len(x)} bytes>"
        if kind.__repr__ is _WITH_ADDRESS:
            return f"<{kind.__name__}>"
        if isinstance(x, Mapping) and not _is_ours(kind):
            return str(self.repr_dict(dict(x), level))
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return f"{x.dtype}[{','.join(map(str, x.shape))}]"
        if callable(x) and hasattr(x, "__qualname__"):
            return str(x.__qualname__)
        if isinstance(x, enum.Enum | PurePath) or kind.__module__ == "builtins" or _is_ours(kind):
            return clipped(_joined(builtins.repr(x)), self.maxother)
        return f"<{kind.__name__}>"


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


_shortener = _Shortener()


def brief(self: object) -> str:
    """A `__repr__`: the fields of a dataclass that differ from their defaults, shortened.

    Of other classes it is the name.
    """
    name = type(self).__name__
    if not dataclasses.is_dataclass(self):
        return f"<{name}>"
    shown = [
        clipped(f"{field.name}={in_one_line(value)}", _MAX_FIELD)
        for field in dataclasses.fields(self)
        if field.repr and not _is_default(field, value := getattr(self, field.name))
    ]
    return "\n".join(_wrapped(f"{name}(", shown))


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        default = field.default
    return value is default or (type(value) is type(default) and _equal(value, default))


def _equal(value: Any, other: Any) -> bool:
    """Whether two are equal; arrays in them have no such answer, and differ."""
    try:
        return bool(value == other)
    except (TypeError, ValueError):
        return False


def _wrapped(begin: str, fields: Sequence[str]) -> list[str]:
    """Fields behind a begin, on as few lines as they fit on."""
    lines = [begin]
    for number, field in enumerate(fields):
        text = field + (", " if number + 1 < len(fields) else "")
        if len(lines[-1]) + len(text) >= MAX_COLUMNS and len(lines[-1]) > 2:
            if len(lines) == MAX_LINES:
                lines[-1] = clipped(lines[-1] + " …", MAX_COLUMNS - 1)
                break
            lines[-1] = lines[-1].rstrip()
            lines.append("  ")
        lines[-1] += text
    return [*lines[:-1], lines[-1] + ")"]


def clipped(text: str, columns: int = MAX_COLUMNS) -> str:
    """One line of at most so many columns."""
    return text if len(text) <= columns else f"{text[: columns - 1].rstrip()}…"


def few(names: Iterable[Any], most: int = _MAX_NAMES) -> str:
    """The first of some names, and how many more there are."""
    texts = list(map(str, names))
    if len(texts) <= most + 1:
        return ", ".join(texts)
    return f"{', '.join(texts[:most])} and {len(texts) - most} more"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 stage`, `4 stages`."""
    plural = f"{noun}{'es' if noun.endswith(('ch', 'sh', 's')) else 's'}"
    return f"{number:,} {noun if number == 1 else plural}"


def card(head: str, rows: Iterable[tuple[str, str]]) -> str:
    """A head, and below it a row for each fact; facts without a text are left out."""
    known = [(name, text) for name, text in rows if text]
    width = max((len(name) for name, _ in known), default=0)
    return few_lines([head, *(f"  {name:<{width}}  {text}" for name, text in known)])


def few_lines(lines: Sequence[str]) -> str:
    """The first lines of a text, and how many more there are."""
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], f"… and {len(lines) - MAX_LINES + 1} more lines"]
    return "\n".join(map(clipped, lines))


def begin_of_text(self: object) -> str:
    """A `__repr__`: the first lines of `str`, which is the long form."""
    return few_lines(str(self).splitlines())


class BriefTable(dict[K, V]):
    """A dictionary that prints its first entries, each in a line."""

    def __repr__(self) -> str:
        entries = [f"{_shortener.repr(key)}: {in_one_line(value)}" for key, value in self._first()]
        more = [f"… and {len(self) - len(entries)} more"] if len(self) > len(entries) else []
        rows = [clipped(entry, MAX_COLUMNS - 2) for entry in [*entries, *more]]
        return "{" + ",\n ".join(rows) + "}"

    def _first(self) -> list[tuple[K, V]]:
        most = MAX_LINES if len(self) <= MAX_LINES else MAX_LINES - 1
        return list(itertools.islice(self.items(), most))


def in_one_line(value: Any) -> str:
    """A value, shortened, as fields and entries show it."""
    return _joined(_shortener.repr(value))


def _joined(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines())


def as_html(text: str, *pictures: str) -> str:
    """What a notebook shows of an object: its lines, and below them pictures, which are SVG."""
    shown = "".join(f'<div style="overflow-x:auto">{picture}</div>' for picture in pictures if picture)
    lines = f'<pre style="font-size:13px;line-height:1.35;overflow-x:auto">{escape(text)}</pre>'
    return f"<div>{lines}{shown}</div>"


def bytes_text(number: float) -> str:
    """A number of bytes, with a prefix."""
    for prefix in ("", "Ki", "Mi", "Gi"):
        if number < 1024 or prefix == "Gi":
            return f"{number:.1f} {prefix}B" if prefix else f"{number:.0f} B"
        number /= 1024
    raise AssertionError(number)


def seconds_text(seconds: float) -> str:
    """Seconds, with a prefix."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError(seconds)
