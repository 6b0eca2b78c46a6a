"""Random programs, each family directed at one planner or pass, which accepts most of them."""

from __future__ import annotations

import os

_APART = 1_000_000


def seeds(count: int) -> range:
    """`count` seeds, others for each value of the environment variable `MPMD_TEST_SEED`."""
    first = int(os.environ.get("MPMD_TEST_SEED", "0")) * _APART
    return range(first, first + count)
