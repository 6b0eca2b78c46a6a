"""V-Half: half the memory of 1F1B."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.scheduling.schedules.v_shaped import VShaped
from mpmd.scheduling.v_patterns import V_HALF_PATTERNS


@dataclass(frozen=True)
class VHalf(VShaped):
    """Half the memory of 1F1B.

    Idle per mesh ``3p-7`` tasks of one stage; every mesh holds at most ``(p+2)//2`` microbatches.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
    """

    name = "v_half"
    patterns = V_HALF_PATTERNS

    def limit(self, num_meshes: int) -> int:
        """Twice ``(p+2)//2``."""
        return 2 * ((num_meshes + 2) // 2)
