"""Passes that prepare a program for buffer assignment."""

from __future__ import annotations

from mpmd.compile.passes.memory.copy_insertion import CopyInsertion
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
