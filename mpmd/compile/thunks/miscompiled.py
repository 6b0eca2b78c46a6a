"""The text of a program whose memory is wrong, or on which the compiler failed, for a report."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import traceback
from collections.abc import Mapping, Sequence

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
    fragment: FragmentModule,
    module: HloModule,
    thunks: Sequence[Thunk],
    assignment: BufferAssignment,
    *,
    stores_last: bool = False,
) -> None:
    """Check the memory of a fragment's program before code generation.

    Args:
        fragment: the source.
        module: the scheduled HLO.
        thunks: its work.
        assignment: its memory.
        stores_last: what kernels of the target do; see `may_share`.

    Raises:
        MiscompiledError: it is wrong, or the check itself fails; holds the text of the program.
    """
    try:
        places = assignment.allocations, assignment.results
        check_thunks(module, thunks, assignment.at, *places, stores_last=stores_last)
        return
    except CompileError as error:
        cause, problems = error, str(error)
    except Exception as failure:  # a program that cannot be checked is not run, either
        cause, problems = CompileError(f"the check failed: {failure}"), traceback.format_exc()
    texts = {
        "thunks": listing(thunks),
        "buffers": assignment_report(assignment),
        "HLO": print_module(module),
    }
    raise MiscompiledError(
        f"fragment {fragment.name} on {fragment.mesh}: the native compiler gave its values the wrong memory",
        _report(fragment, problems, texts),
    ) from cause


def compiler_failure(fragment: FragmentModule) -> MiscompiledError:
    """The error for an exception of the compiler itself, which is being handled."""
    return MiscompiledError(
        f"fragment {fragment.name} on {fragment.mesh}: the native compiler failed",
        _report(fragment, traceback.format_exc(), {}),
        "the native compiler failed on it",
    )


def _report(fragment: FragmentModule, problems: str, texts: Mapping[str, str]) -> str:
    names = ("mpmd", "jax", "jaxlib")
    parts = {
        "what is wrong": problems,
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
        "fragment": f"{fragment.name} on {fragment.mesh}",
        **texts,
        "StableHLO": fragment.text,
    }
    return "\n\n".join(f"==== {title}\n{text.rstrip()}" for title, text in parts.items()) + "\n"


def write_report(fragment: FragmentModule, error: MiscompiledError, dump: Dump | None) -> str:
    """Write the text of a refused program to the dump, or else to a temporary file that stays.

    Returns:
        Its path; or, in brackets, why it could not be written.
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
