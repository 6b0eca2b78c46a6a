"""Passes over communication between devices."""

from __future__ import annotations

from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = ()
