"""StableHLO to HLO: `lower` takes a fragment's module and gives an `HloModule`."""

from mpmd.compile.lowering.lower import lower

__all__ = ["lower"]
