"""Few rows of settings in which every two settings of every two switches meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def covering_rows(switches: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows that together hold all pairs of settings; the first row holds the first setting of each switch.

    Each row is the best of some that are made greedily, switch after switch in random order.  The same
    switches give the same rows.

    Source: the AETG system (Cohen, Dalal, Fredman, Patton, 1997), section 3; here the first row is fixed.
    """
    rng = random.Random(seed)
    names = list(switches)
    missing = {
        ((a, x), (b, y))
        for (a, b) in itertools.combinations(range(len(names)), 2)
        for x in range(len(switches[names[a]]))
        for y in range(len(switches[names[b]]))
    }
    counts = [len(switches[name]) for name in names]
    row = [0] * len(names)
    rows = []
    while missing:
        missing -= _pairs(row)
        rows.append({name: switches[name][i] for name, i in zip(names, row)})
        row = max(
            (_greedy_row(counts, missing, rng) for _ in range(12)), key=lambda r: len(missing & _pairs(r))
        )
    return rows


def _pairs(row: Sequence[int]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))


def _greedy_row(counts: Sequence[int], missing: set[Any], rng: random.Random) -> list[int]:
    """A row that takes for each switch the setting that meets the most others for the first time."""
    row: dict[int, int] = {}
    for a in rng.sample(range(len(counts)), len(counts)):
        settings = rng.sample(range(counts[a]), counts[a])
        row[a] = max(
            settings, key=lambda x: sum(tuple(sorted(((a, x), other))) in missing for other in row.items())
        )
    return [row[a] for a in range(len(counts))]
