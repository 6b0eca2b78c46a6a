"""What a pass is, for both IRs: a frozen record of options with a `run`.

A pass leaves the IR valid; it need not be valid while the pass runs.
"""

from __future__ import annotations

import abc
import dataclasses
import types
import typing
from typing import Any, ClassVar

from mpmd.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """One step of a pipeline.  Its fields are its options; its name is its file, flag and command line.

    The docstring of a pass is: one line; before -> after; Requires; Ensures; Cost; Source.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def run(self, module: Any) -> bool:
        """Rewrites `module` in place; True iff that changed something."""

    def __str__(self) -> str:
        options = " ".join(
            f"{f.name.replace('_', '-')}={option_text(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != _default(f)
        )
        return f"{self.name}{{{options}}}" if options else self.name


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def option_text(value: Any) -> str:
    """An option's value as it stands on a command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return ",".join(option_text(v) for v in value)
    return str(value)


def with_options(kind: type[Pass], text: str) -> Pass:
    """A pass from its command-line options: `'a=1 b-c=x,y'`.

    Values stand bare, in quotes, or in balanced brackets, which may hold spaces.

    Raises:
        ConfigError: an option that the pass does not have, or a value of the wrong kind.
    """
    hints = typing.get_type_hints(kind)
    fields = {f.name.replace("_", "-"): f.name for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in split_options(text):
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigError(f"{kind.name} has no option {key!r}\n  it has: {known}")
        values[fields[key]] = _parsed(value, hints[fields[key]], f"{kind.name}{{{key}}}")
    return kind(**values)


def split_options(text: str) -> list[tuple[str, str]]:
    """The `key=value` pairs of an option string; spaces inside brackets and quotes do not separate."""
    pairs, word, depth, quoted = [], "", 0, False
    for c in text + " ":
        if c == '"':
            quoted = not quoted
        if not quoted:
            depth += (c in "([{<") - (c in ")]}" or (c == ">" and not word.endswith("-")))
        if c.isspace() and depth <= 0 and not quoted:
            if word:
                key, _, value = word.partition("=")
                pairs.append((key, value))
            word, depth = "", 0
        else:
            word += c
    return pairs


def _parsed(text: str, hint: Any, where: str) -> Any:
    """The value that `text` stands for, of the type `hint`."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
        origin = typing.get_origin(hint)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return tuple(_parsed(part, item, where) for part in text.split(",") if part)
    if hint is bool:
        if text.lower() in ("", "true", "1"):
            return True
        if text.lower() in ("false", "0"):
            return False
    elif hint is int:
        try:
            return int(text)
        except ValueError:
            pass
    elif hint is str:
        return text
    elif hasattr(hint, "parse"):
        return hint.parse(text)
    raise ConfigError(f"{where}: cannot read {text!r} as {getattr(hint, '__name__', hint)}")
