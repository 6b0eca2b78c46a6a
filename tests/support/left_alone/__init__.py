"""Programs that a pass must leave as they are: each lacks one thing that the rewrite needs."""

from __future__ import annotations

from tests.support.left_alone import expand, others, simplify

LEFT: dict[str, tuple[str, str]] = {**simplify.LEFT, **expand.LEFT, **others.LEFT}
"""By what is missing: the pass, with its options, and the program."""
