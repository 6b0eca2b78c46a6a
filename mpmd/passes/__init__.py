"""Every pass over the MPMD IR, by name.  A family's table is in its package."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.passes import (
    calls,
    cleanup,
    export,
    import_,
    merge,
    propagation,
    schedule,
    schedule_checks,
    split,
    transfers,
)
from mpmd.support.passes import Pass, pass_named

FAMILIES = (import_, merge, transfers, calls, cleanup, split, schedule, propagation, export, schedule_checks)

PASSES: dict[str, type[Pass]] = {kind.name: kind for family in FAMILIES for kind in family.PASSES}


def make_pass(name: str, options: str | Sequence[tuple[str, str]] = "") -> Pass:
    """A pass by its name and its options, such as `"merge-any-consumer=true"`, or as pairs.

    Raises:
        ConfigError: no such pass or option.
    """
    return pass_named(PASSES, name, options)
