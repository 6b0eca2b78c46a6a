"""Programs of several devices that are written as one."""

from __future__ import annotations

from mpmd.compile.passes.spmd.spmd_partitioner import SpmdPartitioner
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())
