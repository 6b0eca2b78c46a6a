"""Partitioning of programs for several devices."""

from __future__ import annotations

from mpmd.compile.passes.spmd.spmd_partitioner import SpmdPartitioner
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
