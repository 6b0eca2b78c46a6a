"""V-Min: a third of the memory of 1F1B."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.scheduling.schedules.v_shaped import VShaped
from mpmd.scheduling.v_patterns import V_MIN_PATTERNS


@dataclass(frozen=True)
class VMin(VShaped):
    """A third of the memory of 1F1B.

    Idle per mesh at most ``4p-5`` tasks of one stage when all tasks take equally long, more when they do not;
    every mesh holds at most ``(p+4)//3`` microbatches.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
    """

    name = "v_min"
    patterns = V_MIN_PATTERNS

    def limit(self, num_meshes: int) -> int:
        """Twice ``(p+4)//3``."""
        return 2 * ((num_meshes + 4) // 3)
