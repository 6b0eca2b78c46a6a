"""ZB-V: no idle time in the memory of 1F1B."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.scheduling.schedules.v_shaped import VShaped


@dataclass(frozen=True)
class ZeroBubbleV(VShaped):
    """The memory of 1F1B, no idle time between a mesh's first and last task.

    Idle per mesh at most ``(p-1)F`` of one stage; every mesh holds at most ``p`` microbatches.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
    """

    name = "zb_v"

    def limit(self, num_meshes: int) -> int:
        """Twice ``p``."""
        return 2 * num_meshes
