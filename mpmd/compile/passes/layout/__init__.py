"""Passes over the order of arrays in memory."""

from __future__ import annotations

from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = ()
