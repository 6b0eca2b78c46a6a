"""StableHLO to HLO: `lower` takes a module and gives an `HloModule`; `lower_for_mesh` partitions it, too."""

from mpmd.compile.lowering.lower import lower, lower_for_mesh

__all__ = ["lower", "lower_for_mesh"]
