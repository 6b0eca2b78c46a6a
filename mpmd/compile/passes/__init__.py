"""Every pass over HLO, by name.  One pass per file; a family's table stands in its package."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from mpmd.compile import schedule
from mpmd.compile.passes import collectives, expand, fusion, layout, memory, simplify
from mpmd.errors import ConfigError
from mpmd.support.passes import Pass, with_options

FAMILIES = (expand, simplify, collectives, layout, fusion, memory, schedule)

PASSES: dict[str, type[Pass]] = {kind.name: kind for family in FAMILIES for kind in family.PASSES}


def make_pass(name: str, options: str | Sequence[tuple[str, str]] = "") -> Pass:
    """A pass by its name and its options, such as `"layout-sensitive=true"`, or as pairs.

    Raises:
        ConfigError: no such pass or option.
    """
    if name not in PASSES:
        close = difflib.get_close_matches(name, PASSES, 3)
        raise ConfigError(f"unknown pass {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
    return with_options(PASSES[name], options)
