"""See `PASSES` for what stands here."""

from __future__ import annotations

from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = ()
