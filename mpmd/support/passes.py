"""The definition of a pass, for both IRs: a frozen record of options with a `run`.

A pass leaves the IR valid; it need not be valid while the pass runs.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from mpmd.errors import ConfigError, close_to


@typing.dataclass_transform(frozen_default=True)
@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """One step of a pipeline, a frozen record: its fields are its options.

    Its name is its class, flag and command line: `ForgetStages` is `mpmd-forget-stages`.
    The docstring of a pass is: one line; before -> after; Requires; Ensures; Cost; Source.
    """

    name: ClassVar[str]
    prefix: ClassVar[str] = ""
    """Prefix of names that passes take from their classes: the IR they rewrite."""
    reports_changes: ClassVar[bool] = True
    """Whether the result of `run` is exact; else True may also mean no change."""

    def __init_subclass__(cls) -> None:
        if "__annotations__" in vars(cls):  # one without options of its own is the record that its base is
            dataclasses.dataclass(frozen=True)(cls)
        if "name" not in vars(cls):
            cls.name = cls.prefix + re.sub(r"\B(?=[A-Z])", "-", cls.__name__).lower()

    @abc.abstractmethod
    def run(self, module: Any) -> bool:
        """Rewrites `module` in place; True iff that changed something."""

    def __str__(self) -> str:
        options = " ".join(
            f"{f.name.replace('_', '-')}={option_text(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"{self.name}{{{options}}}" if options else self.name


def passes_in(family: str) -> tuple[type[Pass], ...]:
    """The passes of a family: of a module, or of a package: its modules, then packages inside it.

    A module calls this behind its last pass.
    """
    module = importlib.import_module(family)
    parts = [(family, False)]
    if hasattr(module, "__path__"):
        parts = [(part.name, part.ispkg) for part in pkgutil.iter_modules(module.__path__, f"{family}.")]
    passes: list[type[Pass]] = []
    inner: list[type[Pass]] = []
    for name, is_package in parts:
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and issubclass(kind, Pass) and kind.__module__ == name:
                passes += [] if inspect.isabstract(kind) else [kind]
        inner += passes_in(name) if is_package else ()
    return (*passes, *inner)


def option_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return ",".join(option_text(v) for v in value)
    return str(value)


def pass_named(passes: Mapping[str, type[Pass]], name: str, options: str | Sequence[tuple[str, str]]) -> Pass:
    """One of some passes, by its name and its command-line options; see `with_options`.

    Raises:
        ConfigError: no such pass or option.
    """
    if name not in passes:
        raise ConfigError(f"unknown pass {name!r}{close_to(name, passes, 3)}")
    return with_options(passes[name], options)


def with_options(kind: type[Pass], options: str | Sequence[tuple[str, str]]) -> Pass:
    """A pass from its command-line options: `'a=1 b-c=x,y'`, or the parsed pairs.

    Values are bare, in quotes, or in balanced brackets, which may hold spaces.

    Raises:
        ConfigError: an option that the pass does not have, or a value of the wrong kind.
    """
    pairs = split_options(options) if isinstance(options, str) else options
    return kind(**parsed_options(kind, pairs, kind.name))


def parsed_options(kind: type, pairs: Iterable[tuple[str, str]], name: str) -> dict[str, Any]:
    """Field -> value, for the fields of the record `kind`, from the options `pairs` of `name`.

    Raises:
        ConfigError: an option without a field, or a value of the wrong kind.
    """
    hints = _type_hints(kind)
    fields = {f.name.replace("_", "-"): f.name for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key not in fields:
            raise ConfigError(f"{name} has no option {key!r}\n  it has: {', '.join(fields) or 'none'}")
        values[fields[key]] = _parsed(value, hints[fields[key]], f"{name}{{{key}}}")
    return values


_type_hints = functools.cache(typing.get_type_hints)


def split_options(text: str) -> list[tuple[str, str]]:
    """The `key=value` pairs of an option string; spaces inside brackets and quotes do not separate."""
    words = split_outside_brackets(text, " \t\n")
    return [(key, value) for key, _, value in (word.partition("=") for word in words)]


def split_outside_brackets(text: str, separators: str) -> list[str]:
    """The parts of a text between separators outside of brackets and quotes.

    A bracket that is never closed is a letter like any other.
    """
    end_of, parts, i = _closings(text), [""], 0
    while i < len(text):
        end = end_of.get(i, i) + 1
        if text[i] in separators:
            parts.append("")
        else:
            parts[-1] += text[i:end]
        i = end
    return [part for part in parts if part]


_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">", '"': '"'}


def _closings(text: str) -> dict[int, int]:
    """Where each bracket or quote that opens is closed.  The `>` of an arrow closes nothing."""
    open_at: list[int] = []
    found: dict[int, int] = {}
    for i, c in enumerate(text):
        inside = text[open_at[-1]] if open_at else ""
        if inside and c == _CLOSING[inside] and text[i - 1 : i + 1] != "->":
            found[open_at.pop()] = i
        elif c in _CLOSING and inside != '"':
            open_at.append(i)
    return found


def _parsed(text: str, hint: Any, where: str) -> Any:
    """The value of `text`, of the type `hint`."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
        origin = typing.get_origin(hint)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return tuple(_parsed(part, item, where) for part in split_outside_brackets(text, ","))
    if hint is bool:
        if text.lower() in ("", "true", "1"):
            return True
        if text.lower() in ("false", "0"):
            return False
    elif hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            pass
    elif hint is str:
        return text
    elif hasattr(hint, "parse"):
        return hint.parse(text)
    raise ConfigError(f"{where}: cannot read {text!r} as {getattr(hint, '__name__', hint)}")


def with_overrides(pass_: Pass, entries: Iterable[str]) -> Pass:
    """A pass with the options that entries such as `"mpmd-x{a-b=true}"` give to passes of its name."""
    for entry in entries:
        name, _, options = entry.partition("{")
        if name == pass_.name:
            values = parsed_options(type(pass_), split_options(options.removesuffix("}")), name)
            pass_ = dataclasses.replace(pass_, **values)
    return pass_
