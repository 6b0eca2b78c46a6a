"""Every pass over HLO, by name.  A family's table is in its package."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile import schedule
from mpmd.compile.passes import collectives, expand, fusion, layout, simplify
from mpmd.support.passes import Pass, pass_named

FAMILIES = (expand, simplify, collectives, layout, fusion, schedule)

PASSES: dict[str, type[Pass]] = {kind.name: kind for family in FAMILIES for kind in family.PASSES}


def make_pass(name: str, options: str | Sequence[tuple[str, str]] = "") -> Pass:
    """A pass by its name and its options, such as `"layout-sensitive=true"`, or as pairs.

    Raises:
        ConfigError: no such pass or option.
    """
    return pass_named(PASSES, name, options)
