"""Reasons why fragments have no native code, and the one warning that lists them."""

from __future__ import annotations

from collections.abc import Mapping

from mpmd.compile.backends.mixed import MixedExecutable
from mpmd.compile.executable import Executable
from mpmd.support.user_warnings import PendingWarning

_MAX_NAMES = 8


def fallback_warning(executables: Mapping[str, Executable]) -> PendingWarning:
    """One warning for all fragments that XLA compiles although native code was requested, with reasons."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, executable in executables.items():
        reasons = tuple(getattr(executable, "reasons", ()))
        if reasons:
            part = "in part" if isinstance(executable, MixedExecutable) else "as a whole"
            groups.setdefault((part, reasons), []).append(f"{name} on {executable.fragment.mesh}")
    lines = []
    for (part, reasons), names in groups.items():
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        what = "fragment" if len(names) == 1 else "fragments"
        verb = "is" if len(names) == 1 else "are"
        lines.append(f"{what} {', '.join(names[:_MAX_NAMES])}{more} {verb} compiled by XLA {part}:")
        lines += [f"  {reason}" for reason in reasons]
    return PendingWarning("\n".join(lines))
