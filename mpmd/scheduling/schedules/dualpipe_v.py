"""DualPipeV: both directions of DualPipe on one V, without a second copy of the stages."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.scheduling.schedules.v_shaped import VShaped


@dataclass(frozen=True)
class DualPipeV(VShaped):
    """The V-shaped half of DualPipe: half a microbatch more of memory than ``zb_v``.

    Idle per mesh ``p-1`` tasks of one stage; every mesh holds at most ``p+1/2`` microbatches.

    Source: DeepSeek, DualPipe, 2025; Liu et al., the halving procedure.
    """

    name = "dualpipe_v"

    def limit(self, num_meshes: int) -> int:
        """``2p+1``."""
        return 2 * num_meshes + 1
