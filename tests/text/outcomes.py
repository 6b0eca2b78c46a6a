"""What passes do to the programs of their text tests: change them, leave them alone, complain."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from mpmd import ir
from mpmd.errors import ConfigError, MpmdError
from mpmd.passes import PASSES
from mpmd.support import diagnostics
from mpmd.support.diagnostics import Severity
from mpmd.tools import opt
from tests.support.definitions import used_by

CHANGE, NO_CHANGE, COMPLAINT = "change", "no change", "complaint"

HERE = Path(__file__).parent


def run_lines(text: str) -> list[str]:
    """The commands of a file."""
    joined = re.sub(r"\\\n\s*//\s*RUN:", " ", text)
    return [match[1].strip() for match in re.finditer(r"^\s*//\s*RUN:(.*)$", joined, re.M)]


def files_of(name: str) -> list[Path]:
    """The text tests of a pass: `fragment-dce.mlir`, and what begins so, but for other passes' tests."""
    stem = name.removeprefix("mpmd-")
    others = {other.removeprefix("mpmd-") for other in PASSES} - {stem}
    return [
        path
        for path in sorted(HERE.rglob(f"{stem}*.mlir"))
        if not any(len(other) > len(stem) and path.stem.startswith(other) for other in others)
    ]


def outcomes(name: str) -> set[str]:
    """What a pass does, on any program of its text tests, with any options that they use."""
    return {found for path in files_of(name) for found in _outcomes(name, path)}


def _outcomes(name: str, path: Path) -> Iterator[str]:
    text = path.read_text()
    for line in run_lines(text):
        words = shlex.split(line.partition("|")[0].replace("2>&1", ""))
        try:
            command = opt.read_command(
                [word for word in words[words.index("mpmd-opt") + 1 :] if word != "%s"]
            )
        except ConfigError:  # an option that cannot be
            yield COMPLAINT
            continue
        for piece in re.split(r"(?m)^// -----[ \t]*$", text) if command.split else [text]:
            yield from _outcomes_of_piece(name, piece, command)


def _outcomes_of_piece(name: str, text: str, command: opt.Command) -> Iterator[str]:
    with diagnostics.collecting() as found:
        try:
            module = ir.parse(text)
            for pass_ in (step.pass_ for step in command.steps):
                before, said = _functions(module), len(found)
                pass_.run(module)
                if pass_.name == name:
                    after = _functions(module)
                    if after != before:
                        yield CHANGE
                    if any(after.get(f) == text for f, text in before.items() if f.startswith("@")):
                        yield NO_CHANGE
                    if any(d.severity is not Severity.NOTICE for d in found[said:]):
                        yield COMPLAINT
        except MpmdError:
            yield COMPLAINT


def _functions(module: ir.Module) -> dict[str, str]:
    """The functions of a module, and what else it holds, by name as text."""
    found = {}
    for number, op in enumerate(list(module.body.operations)):
        found[f"@{op.symbol}" if isinstance(op, ir.Func) else str(number)] = ir.op_text(op)
    return found


def wanted(name: str) -> set[str]:
    """Required observations of a pass's text tests."""
    kinds = [kind for kind in PASSES[name].__mro__ if kind.__module__.startswith("mpmd.passes.")]
    parts = [used_by(sys.modules[kind.__module__], kind.__name__) for kind in kinds]
    source = "".join(text for part in parts for text in part.values())
    found = {NO_CHANGE}
    if not re.search("validate|verify|verifier", name):
        found.add(CHANGE)
    if re.search(r"diagnostics\.(error|late_error|warning)\(|\bLimited\(", source):
        found.add(COMPLAINT)
    return found
