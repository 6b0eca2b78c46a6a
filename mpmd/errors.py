"""Every exception that mpmd raises on purpose, in one hierarchy.

An error is a page for the reader: the problem in the user's words, where it is, got and
expected, and what to do.  Several problems found together are raised together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MpmdError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(MpmdError, ValueError):
    """The topology, the assignment or an option cannot be used as given."""


class SignatureError(MpmdError, TypeError):
    """A call does not fit what a function was traced or compiled for."""


class PlacementError(MpmdError, ValueError):
    """A computation or value cannot be given a mesh."""


class IRError(MpmdError, ValueError):
    """Misuse of the IR: the change would leave an invalid program."""


class PassError(MpmdError, ValueError):
    """A pass found the program wrong.  Holds all diagnostics, worst first."""

    def __init__(self, message: str, diagnostics: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.diagnostics = tuple(diagnostics)


class ScheduleError(MpmdError, ValueError):
    """A pipeline schedule is impossible; names the first impossible task."""


class ProgramError(MpmdError, ValueError):
    """An instruction stream breaks a rule of the runtime; found before the first step."""


class CompileError(MpmdError, RuntimeError):
    """A fragment cannot be compiled."""


class MiscompiledError(CompileError):
    """Native code that its own check refused before it ran, or on which the compiler itself failed.

    Attributes:
        reason: what happened, for the user.
        report: the text of the program.
    """

    def __init__(
        self,
        message: str,
        report: str = "",
        reason: str = "a check found a mistake in the native code before it ran",
    ) -> None:
        super().__init__(message)
        self.report, self.reason = report, reason


class FragmentError(MpmdError, RuntimeError):
    """A fragment failed while it ran; names fragment, mesh, stage, microbatch and step.

    Attributes:
        mesh: where it ran.
        position: in a legal order of all instructions of the step, equal in every process.
    """

    mesh: str = ""
    position: int = 0


class NonFiniteError(FragmentError, FloatingPointError):
    """A fragment computed a NaN or an infinity while JAX's check for them was on."""


class PeerError(MpmdError, RuntimeError):
    """Another process of the program failed, ended, stopped, or runs another program; names it."""


class TransferError(MpmdError, RuntimeError):
    """An array could not be sent to another process.

    Attributes:
        mesh: that the array is on.
    """

    mesh: str = ""


class AbsentValueError(MpmdError, RuntimeError):
    """The value of an array was read in a process that does not hold it."""


class NotPicklableError(MpmdError, TypeError):
    """An object of this process cannot be pickled for another one; says what to pickle instead."""


class HloError(MpmdError, ValueError):
    """HLO text or an HLO module is malformed; shows the place."""


class CheckpointError(MpmdError, RuntimeError):
    """A checkpoint cannot be read or written."""


class DataError(MpmdError, ValueError):
    """Training data cannot be read."""


def collect(kind: type[MpmdError], problems: Sequence[str], heading: str = "") -> MpmdError:
    """One error for several problems, numbered when there is more than one."""
    if len(problems) == 1:
        return kind(problems[0])
    lines = [heading or f"{len(problems)} problems:"]
    lines += [f"  {n}. {problem}" for n, problem in enumerate(problems, 1)]
    return kind("\n".join(lines))


def close_to(word: str, known: Iterable[str], most: int = 1) -> str:
    """The end of a sentence about an unknown word: similar known words, if there are any."""
    close = difflib.get_close_matches(word, list(known), most)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
