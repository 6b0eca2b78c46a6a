"""A program that the check of its memory refuses: its text, from which the mistake can be found."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import traceback
from collections.abc import Sequence

from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.buffers.report import assignment_report
from mpmd.compile.dump import Dump
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, print_module
from mpmd.compile.thunks.check import check_thunks
from mpmd.compile.thunks.thunk import Thunk, listing
from mpmd.errors import CompileError, MiscompiledError

_FILE = "miscompiled.txt"


def check_program(
    fragment: FragmentModule, module: HloModule, thunks: Sequence[Thunk], assignment: BufferAssignment
) -> None:
    """Check the memory of a fragment's program before there is code of it.

    Raises:
        MiscompiledError: it is wrong, or the check itself fails; holds the text of the program.
    """
    try:
        check_thunks(module, thunks, assignment.at, assignment.allocations, assignment.results)
        return
    except CompileError as error:
        cause, problems = error, str(error)
    except Exception as failure:  # a program that cannot be checked is not run, either
        cause, problems = CompileError(f"the check failed: {failure}"), traceback.format_exc()
    parts = {
        "what is wrong": problems,
        "versions": ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("mpmd", "jax", "jaxlib")
        ),
        "fragment": f"{fragment.name} on {fragment.mesh}",
        "thunks": listing(thunks),
        "buffers": assignment_report(assignment),
        "HLO": print_module(module),
        "StableHLO": fragment.text,
    }
    report = "\n\n".join(f"==== {title}\n{text.rstrip()}" for title, text in parts.items())
    raise MiscompiledError(
        f"fragment {fragment.name} on {fragment.mesh}: the native compiler gave its values the wrong memory",
        report + "\n",
    ) from cause


def write_report(fragment: FragmentModule, error: MiscompiledError, dump: Dump | None) -> str:
    """Write the text of a refused program to the dump, or else to a temporary file that stays.

    Returns:
        Where it is; or, in brackets, why it could not be written.
    """
    try:
        if dump is not None:
            dump.write(fragment, _FILE, error.report)
            return str(dump.folder_of(fragment) / _FILE)
        handle, path = tempfile.mkstemp(prefix="mpmd-", suffix=f"-{_FILE}")
        with os.fdopen(handle, "w") as file:
            file.write(error.report)
        return path
    except OSError as problem:
        return f"(it could not be written: {problem})"
