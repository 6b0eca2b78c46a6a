"""Passes, for both IRs: frozen records of options with a `run`, and running several in order.

A pipeline is verified, timed and dumped, and an error in it names the pass.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import inspect
import logging
import pkgutil
import re
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mpmd.errors import ConfigError, ScheduleError, close_to
from mpmd.support import diagnostics


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
    closings: dict[int, int] = {}
    for i, c in enumerate(text):
        inside = text[open_at[-1]] if open_at else ""
        if inside and c == _CLOSING[inside] and text[i - 1 : i + 1] != "->":
            closings[open_at.pop()] = i
        elif c in _CLOSING and inside != '"':
            open_at.append(i)
    return closings


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
        try:
            return hint.parse(text)
        except ScheduleError as error:  # the caller handles one class of errors for all options
            raise ConfigError(str(error)) from error
    raise ConfigError(f"{where}: cannot read {text!r} as {getattr(hint, '__name__', hint)}")


def with_overrides(pass_: Pass, entries: Iterable[str]) -> Pass:
    """A pass with the options that entries such as `"mpmd-x{a-b=true}"` give to passes of its name."""
    for entry in entries:
        name, _, options = entry.partition("{")
        if name == pass_.name:
            values = parsed_options(type(pass_), split_options(options.removesuffix("}")), name)
            pass_ = dataclasses.replace(pass_, **values)
    return pass_


log = logging.getLogger("mpmd.passes")


@dataclasses.dataclass(frozen=True)
class Watch:
    """Actions around each pass.

    Attributes:
        verify: called with the module after each pass; raises if it is invalid.
        text: prints a module; needed for dumps and for checking the changed bit.
        verify_each: whether to verify after every pass rather than once at the end.
        check_changed: whether to compare the result of a pass with its change of the text.
        disabled: names of passes to leave out.
        dump_to: folder for one file per pass that changed the module.
        dump_passes: regular expression on names of passes to dump.
        after: called with each pass, the module after it, whether that changed, and the seconds it took; for
            tools that show a pipeline.
        suffix: extension of dumped files.
    """

    verify: Callable[[Any], None]
    text: Callable[[Any], str]
    verify_each: bool = False
    check_changed: bool = False
    disabled: frozenset[str] = frozenset()
    dump_to: Path | None = None
    dump_passes: str = ".*"
    after: Callable[[Pass, Any, bool, float], None] | None = None
    suffix: str = ".mlir"


@dataclasses.dataclass
class Timing:
    """Seconds per pass, in the order in which they ran."""

    seconds: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    def as_text(self) -> str:
        """A table, slowest first."""
        rows = sorted(self.seconds, key=lambda row: -row[1])
        return "\n".join(f"{seconds * 1e3:9.2f} ms  {name}" for name, seconds in rows)


def run_pipeline(
    module: Any, passes: Sequence[Pass], watch: Watch, timing: Timing | None = None, first: int = 0
) -> diagnostics.Diagnostics:
    """Runs the passes on `module`, in place; dumps are numbered from `first`.

    Returns:
        Warnings and notices of all passes.

    Raises:
        PassError: with all errors that the first failing pass reported, and all late errors before it.
    """
    timing = timing if timing is not None else Timing()
    with diagnostics.collecting() as reports:
        for number, pass_ in enumerate(passes, first):
            if name_of(pass_) in watch.disabled:
                continue
            try:
                changed = _run_one(number, pass_, module, watch, timing)
            except Exception:
                reports.raise_if_errors()  # a late error explains what follows from it
                raise
            if reports.of(diagnostics.Severity.ERROR):
                reports.raise_if_errors()
            _look_at(number, pass_, module, watch, changed, timing)
        if not watch.verify_each and not reports.errors:
            watch.verify(module)
    reports.raise_if_errors()
    return reports


def _run_one(number: int, pass_: Pass, module: Any, watch: Watch, timing: Timing) -> bool:
    """Runs one pass; whether it changed the module, exactly if that is needed."""
    looks = watch.after is not None or watch.dump_to is not None
    compares = watch.check_changed or (looks and not pass_.reports_changes)
    before = watch.text(module) if compares else ""
    start = time.perf_counter()
    try:
        changed = pass_.run(module)
    except Exception as e:
        e.add_note(f"while running pass {number}: {pass_}")
        raise
    timing.seconds.append((str(pass_), time.perf_counter() - start))
    log.debug("%-50s %s %.2f ms", pass_, "changed" if changed else "-", timing.seconds[-1][1] * 1e3)
    if not compares:
        return changed
    differs = before != watch.text(module)
    if pass_.reports_changes and changed != differs:
        raise AssertionError(f"{pass_.name} says changed={changed}, its text says otherwise")
    return differs


def _look_at(number: int, pass_: Pass, module: Any, watch: Watch, changed: bool, timing: Timing) -> None:
    """Verifies, compares and dumps the module after a pass without errors."""
    if watch.verify_each and changed:
        try:
            watch.verify(module)
        except Exception as e:
            e.add_note(f"after pass {number}: {pass_}")
            raise
    if watch.after is not None:
        watch.after(pass_, module, changed, timing.seconds[-1][1])
    if watch.dump_to is not None and changed and re.search(watch.dump_passes, name_of(pass_)):
        watch.dump_to.mkdir(parents=True, exist_ok=True)
        (watch.dump_to / f"{number:03d}.{name_of(pass_)}{watch.suffix}").write_text(watch.text(module))


def name_of(pass_: Pass) -> str:
    """The name of a pass, MLIR's included: without options, and without its pipeline."""
    match = re.match(r"(?:[\w.]+\()?([\w-]+)", str(pass_))
    return match[1] if match else pass_.name
