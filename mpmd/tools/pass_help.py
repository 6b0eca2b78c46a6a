"""What the command line says about passes: a line for each, or one with its options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence

from mpmd.support.passes import Pass, option_text

Described = Mapping[str, type[Pass] | Callable[..., object]]
"""Passes, and functions that make groups of them, by their names on the command line."""


def pass_list(described: Described) -> str:
    """A line for each: its name and the first line of its docstring."""
    wide = max(map(len, described))
    lines = (f"-{name:<{wide}}  {_docstring(described[name])[0]}".rstrip() for name in sorted(described))
    return "".join(f"{line}\n" for line in lines)


def pass_help(described: Described, names: Sequence[str]) -> str:
    """The docstrings of some of them, each with its options and their defaults."""
    return "\n".join(_help(described, name) for name in dict.fromkeys(names))


def _help(described: Described, name: str) -> str:
    if name not in described:
        return f"-{name}\n  a pass of MLIR, StableHLO or Shardy, which their documentation describes\n"
    kind = described[name]
    lines = [f"-{name}", *(f"  {line}".rstrip() for line in _docstring(kind))]
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    if fields:
        shown = {f.name.replace("_", "-"): option_text(f.default) or "none" for f in fields}
        wide = max(map(len, shown))
        lines += ["", f"  options, as in -{name}='NAME=VALUE ...':"]
        lines += [f"    {option:<{wide}}  default {value}" for option, value in shown.items()]
    return "\n".join(lines) + "\n"


def _docstring(thing: object) -> list[str]:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "").splitlines() or [""]
