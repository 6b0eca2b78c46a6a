"""Shared code of tools that run passes over text: switches, help, the pieces of a file, expected findings.

    // expected-error@+1 {{words that the message contains}}

A comment says which finding of a run is expected.  The kinds are `error`, `warning`, `remark` and `note`.
With `-re` after the kind, the text in an inner `{{}}` is a regular expression, in which `.` matches ends of
lines too.  The place is the comment's own line, or `@+N`, `@-N`, `@above`, `@below` (the nearest line that
holds no expectation), or `@unknown`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from mpmd.errors import ConfigError, MpmdError
from mpmd.support.passes import Pass, Timing, option_text
from mpmd.version import __version__

_EXPECTATION = re.compile(
    r"expected-(error|warning|remark|note)(-re)?\s*(@(?:[+-]\d+|above|below|unknown))?\s*\{\{(.*?)\}\}\s*(?=$|//)"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One message at one place of a file.  `line` and `column` count from 1; None where they are unknown."""

    kind: str
    message: str
    line: int | None = None
    column: int | None = None

    def as_text(self, file: str) -> str:
        place = file if self.line is None else f"{file}:{self.line}:{self.column}"
        return f"{place}: {self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Expectation:
    """One `expected-` comment; `written` is the line of the comment itself."""

    kind: str
    words: str
    is_regex: bool
    line: int | None
    written: int

    def admits(self, finding: Finding) -> bool:
        """Whether the finding matches the expectation."""
        if self.kind != finding.kind or self.line != finding.line:
            return False
        if self.is_regex:
            return re.search(_as_regex(self.words), finding.message, re.DOTALL) is not None
        return self.words in finding.message


def _as_regex(words: str) -> str:
    """Text in inner `{{}}` is a regular expression, all other text is literal."""
    parts = re.split(r"\{\{(.*?)\}\}", words)
    return "".join(f"(?:{part})" if i % 2 else re.escape(part) for i, part in enumerate(parts))


def expectations(text: str) -> list[Expectation]:
    """The expectations of a text, in order."""
    lines = text.split("\n")
    matches = [
        (number, match) for number, line in enumerate(lines, 1) for match in _EXPECTATION.finditer(line)
    ]
    holding = {number for number, _ in matches}
    return [
        Expectation(match[1], match[4], match[2] is not None, _line_meant(match[3], number, holding), number)
        for number, match in matches
    ]


def _line_meant(place: str | None, written: int, holding: set[int]) -> int | None:
    if place is None:
        return written
    if place == "@unknown":
        return None
    if place in ("@above", "@below"):
        step = -1 if place == "@above" else 1
        line = written + step
        while line in holding:
            line += step
        return line
    return written + int(place[1:])


def mismatches(
    expected: Sequence[Expectation], findings: Iterable[Finding], only_expected: bool = False
) -> Iterator[Finding]:
    """An error for each finding that was not expected, then for each expectation that was not met.

    An expectation may match several findings, as in MLIR; those that have none yet come first.  Notes need
    not be expected; with `only_expected` unexpected findings are ignored.
    """
    open_ = list(expected)
    for finding in findings:
        match = next((e for e in [*open_, *expected] if e.admits(finding)), None)
        if match in open_:
            open_.remove(match)
        elif match is None and finding.kind != "note" and not only_expected:
            yield Finding(
                "error", f"unexpected {finding.kind}: {finding.message}", finding.line, finding.column
            )
    for e in open_:
        yield Finding("error", f'expected {e.kind} "{e.words}" was not produced', e.written, 1)


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


SEPARATOR = "// -----"
"""A line between two pieces of a file."""

SWITCHES = {
    "split-input-file": "split",
    "verify-diagnostics": "verify_diagnostics",
    "verify-each": "verify_each",
    "check-changed": "check_changed",
    "timing": "timing",
    "list-passes": "list_passes",
    "help": "help",
    "h": "help",
    "version": "version",
}
"""Switch -> field of `TextCommand`."""

READER_GONE = 141
"""Exit status of a program that wrote to a closed pipe: 128 and the number of SIGPIPE."""

_TRUE = {"", "true", "1"}


@dataclasses.dataclass
class TextCommand:
    """A parsed command line: the fields that all tools have."""

    file: str = "-"
    output: str = "-"
    split: bool = False
    verify_diagnostics: bool = False
    verify_each: bool = True
    check_changed: bool = False
    print_after_all: bool = False
    print_after_change: bool = False
    timing: bool = False
    list_passes: bool = False
    help: bool = False
    version: bool = False
    named: list[str] = dataclasses.field(default_factory=list)
    """Names of passes and groups, in the order in which they are given."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one text: the module's text unless it failed, and the messages about it."""

    ok: bool
    text: str | None
    findings: list[Finding]


C = TypeVar("C", bound=TextCommand)


# -- reading ------------------------------------------------------------------------------------------


def read_arguments(
    argv: Sequence[str], command: TextCommand, take: Callable[[str, str, Iterator[str]], None]
) -> None:
    """Records the file and its output in `command`, and passes every other flag to `take`.

    Args:
        argv: the arguments.
        command: is filled in.
        take: called with the name of a flag, its value, and the remaining arguments.

    Raises:
        ConfigError: an argument that cannot be read.
    """
    arguments = iter(argv)
    for argument in arguments:
        if argument == "-" or not argument.startswith("-"):
            command.file = argument
            continue
        name, value = name_and_value(argument)
        if name == "o":
            command.output = value or next(arguments, "-")
        else:
            take(name, value, arguments)


def set_switch(command: TextCommand, switches: dict[str, str], name: str, value: str) -> bool:
    """Records a switch; False if there is none of this name."""
    if name in switches:
        setattr(command, switches[name], value.lower() in _TRUE)
    return name in switches


def name_and_value(argument: str) -> tuple[str, str]:
    """`--name=value`, `-name{value}` or `-name` as name and value.

    Raises:
        ConfigError: it has none of these forms.
    """
    match = re.fullmatch(r"--?([\w.-]+)(?:=(.*)|\{(.*)\})?", argument, re.DOTALL)
    if match is None:
        raise ConfigError(
            f"cannot read the argument {argument!r}\n"
            "  expected: a file, -name, -name=value or -name{options}"
        )
    return match[1], _unwrapped(match[2] or match[3] or "")


def _unwrapped(value: str) -> str:
    """A value without the braces, or the quotes, around all of it."""
    value = value.strip()
    for first, last in ("{}", "''", '""'):
        if len(value) > 1 and value[0] == first and value[-1] == last:
            return value[1:-1]
    return value


def version_text(tool: str) -> str:
    """What `--version` prints: the versions that a report of an error needs."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    return f"{tool} {__version__}, {', '.join(versions)}, Python {platform.python_version()}"


# -- running ------------------------------------------------------------------------------------------


def run_script(main: Callable[[], int]) -> NoReturn:
    """Runs a console script and ends with its status; quietly if its reader closed the pipe, as `head`."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes the output when it ends, and would report the closed pipe once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = READER_GONE
    sys.exit(status)


def run_tool(
    tool: str,
    usage: str,
    described: Described,
    read: Callable[[], C],
    work: Callable[[C, str], tuple[bool, str]],
) -> int:
    """A whole run of a tool; 0 iff all went well.

    Args:
        tool: its name, as the prefix of messages about files and arguments.
        usage: what `-help` prints.
        described: the passes that `-list-passes` lists, and `-PASS -help` describes.
        read: the command line.
        work: from the command and the input to the status and the output.
    """
    try:
        command = read()
        if command.help:
            sys.stdout.write(pass_help(described, command.named) if command.named else usage)
            return 0
        if command.version:
            sys.stdout.write(f"{version_text(tool)}\n")
            return 0
        if command.list_passes:
            sys.stdout.write(pass_list(described))
            return 0
        text = sys.stdin.read() if command.file == "-" else Path(command.file).read_text()
    except (MpmdError, OSError, UnicodeDecodeError) as e:
        sys.stderr.write(f"{tool}: {e}\n")
        return 1
    try:
        ok, printed = work(command, text)
        if command.output == "-":
            sys.stdout.write(printed)
            sys.stdout.flush()
        else:
            Path(command.output).write_text(printed)
    except BrokenPipeError:
        raise  # the reader is gone
    except OSError as e:
        sys.stderr.write(f"{tool}: {e}\n")
        return 1
    return 0 if ok else 1


def run_pieces(
    command: TextCommand, text: str, run_text: Callable[[str, Timing], Result]
) -> tuple[bool, str, list[str]]:
    """Whether all pieces of a text went well, the output, and the messages, to stderr, too."""
    pieces = re.split(rf"(?m)^{SEPARATOR}[ \t]*$", text) if command.split else [text]
    ok, printed, said, line = True, [], [], 0
    timing = Timing()
    for piece in pieces:
        # Blank lines in front, so that places count from the begin of the file.
        result = run_text("\n" * line + piece, timing)
        line += piece.count("\n")
        ok &= result.ok
        if result.text is not None:
            printed.append(result.text)
        said += [f.as_text(command.file) for f in result.findings]
    sys.stderr.write("".join(line + "\n" for line in said))
    if command.timing:
        sys.stderr.write(timing.as_text() + "\n")
    return ok, f"{SEPARATOR}\n".join(printed), said
