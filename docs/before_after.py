"""What passes do to the programs of their text tests, as differences: shown on pages of the site."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parent.parent / "tests" / "text"
OF_TESTS = ("-split-input-file", "-verify-diagnostics", "-check-changed", "-allow-unregistered")
MESH_TYPE = re.compile(r'!mpmd\.mesh_tensor<"([^"]*)", tensor<([^<>]*)>((?:, [^<>]*(?:<[^<>]*>)*[^<>]*)?)>')
MAX_LINES = 80
"""Of a difference; the rest is left out."""


def page(tool: ModuleType, families: Iterable[ModuleType], suffix: str) -> Iterator[str]:
    """Markdown: a heading for each family, and an entry for each of its passes.

    Args:
        tool: `mpmd.tools.opt` or `mpmd.tools.hlo_opt`.
        families: packages of passes.
        suffix: of the files of text tests.
    """
    files = [path.read_text() for path in sorted(TESTS.rglob(f"*{suffix}"))]
    for family in families:
        if family.PASSES:
            yield f"## {family.__name__.rpartition('.')[2].rstrip('_')}"
        for kind in family.PASSES:
            first = (kind.__doc__ or "").strip().partition("\n")[0]
            yield f"### {kind.name}\n\n{first}\n\n{entry(tool.main, files, kind.name, suffix)}"


def entry(main: Callable[[Sequence[str]], int], files: Iterable[str], name: str, suffix: str) -> str:
    """The command and the difference of the shortest program that a pass changes."""
    found = [
        (arguments, difference)
        for text in files
        if f"-{name}" in text
        for arguments, pieces in commands(text, name)
        for piece in pieces
        if (difference := changed(main, arguments, piece, suffix))
    ]
    if not found:
        return "It changes no program of its tests; it reports.\n"
    arguments, lines = min(found, key=lambda example: len(example[1]))
    command = " ".join([suffix_tool(suffix), *map(shlex.quote, arguments)])
    shown = [*lines[:MAX_LINES], "  ..."] if len(lines) > MAX_LINES else lines
    return f"```text\n{command}\n```\n\n```diff\n" + "\n".join(shown) + "\n```\n"


def suffix_tool(suffix: str) -> str:
    """The tool that reads such files."""
    return "mpmd-opt" if suffix == ".mlir" else "mpmd-hlo-opt"


def commands(text: str, name: str) -> Iterator[tuple[list[str], list[str]]]:
    """The passes of each RUN line up to this one, and the programs of the file."""
    joined = re.sub(r"\\\n\s*//\s*RUN:", " ", text)
    pieces = [re.sub(r"^\s*//.*\n", "", piece, flags=re.M) for piece in text.split("// -----")]
    for line in re.findall(r"RUN: *mpmd-(?:hlo-)?opt %s(.*?)(?:\||$)", joined, re.M):
        passes = [argument for argument in shlex.split(line) if not argument.startswith(OF_TESTS)]
        names = [argument.partition("=")[0] for argument in passes]
        if f"-{name}" in names:
            yield passes[: names.index(f"-{name}") + 1], pieces


def changed(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], program: str, suffix: str
) -> list[str]:
    """The lines of the difference that the last pass makes to a program; none if one fails."""
    before, after = (printed(main, given, program, suffix) for given in (arguments[:-1], arguments))
    if before is None or after is None:
        return []
    pair = [short(text).splitlines() for text in (before, after)]
    lines = list(difflib.unified_diff(*pair, n=6, lineterm=""))[2:]
    return ["  ..." if line.startswith("@@") else line for line in lines if not line.startswith("@@ -1,")]


def printed(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], program: str, suffix: str
) -> str | None:
    """The output of the tool for a program; None if it reports an error."""
    unregistered = ["-allow-unregistered-dialect"] if suffix == ".mlir" else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"example{suffix}"
        path.write_text(program)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            failed = main([str(path), *unregistered, *arguments])
    return None if failed else out.getvalue()


def short(text: str) -> str:
    """The program with short types of arrays on meshes."""
    return MESH_TYPE.sub(r"\1:\2\3", re.sub(r"#mpmd.topology<(.*)>", r"\1", text))
