"""Eager 1F1B: twice the forwards ahead, so that transfers have time to arrive."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.scheduling.schedules.one_f_one_b import OneFOneB


@dataclass(frozen=True)
class EagerOneFOneB(OneFOneB):
    """1F1B with twice the warm-up: a transfer may take as long as a task without a wait.

    Idle as 1F1B when transfers are instant; position ``r`` of ``p`` holds ``min(m, 2(p-r)-1)`` microbatches.

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, 2022.
    """

    name = "eager_1f1b"
    warm_up_factor = 2
