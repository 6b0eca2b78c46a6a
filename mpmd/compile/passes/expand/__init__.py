"""Passes that replace operations which later passes or backends need not know."""

from __future__ import annotations

from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = ()
