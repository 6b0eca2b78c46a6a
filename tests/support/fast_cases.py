"""Which cases of a parametrised test `make test` runs; the others are marked `slow`.

    @pytest.mark.fast_cases                    enough cases that each value of each parameter occurs
    @pytest.mark.fast_cases(3)                 three, evenly spread
    @pytest.mark.fast_cases("f32-row", "u8")   these, by the ids that pytest prints

The first rule is each-choice coverage.  Source: Ammann and Offutt, Using formal methods to derive test frames
in category-partition testing, 1994.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest

MARK = "fast_cases"


def mark_slow_cases(
    items: Sequence[pytest.Item], whole: bool = True, named: Collection[str] = frozenset()
) -> None:
    """Marks the cases that `make test` leaves out.

    Args:
        items: in the order of collection.
        whole: all cases of each test are among them.
        named: node ids of cases that stay: each shows what no other test does.

    Raises:
        pytest.UsageError: a mark names a case that its test does not have.
    """
    for _, group in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if not item.get_closest_marker("slow")]
        mark = cases[0].get_closest_marker(MARK) if cases else None
        if mark is not None:
            kept = _kept(cases, mark.args, whole)
            for number, item in enumerate(cases):
                if number not in kept and item.nodeid not in named:
                    item.add_marker("slow")


def _kept(cases: Sequence[Any], wanted: tuple[Any, ...], whole: bool) -> set[int]:
    if not wanted:
        return each_value([_values(item) for item in cases])
    if isinstance(wanted[0], int):
        count = min(wanted[0], len(cases))
        return {number * len(cases) // count for number in range(count)}
    ids = [item.callspec.id for item in cases]
    if whole and (lost := set(wanted) - set(ids)):
        raise pytest.UsageError(f"{cases[0].nodeid}: {MARK} names {sorted(lost)}, and the cases are {ids}")
    return {number for number, name in enumerate(ids) if name in wanted}


def _values(item: Any) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in item.callspec.params.items()}


def each_value(cases: Sequence[set[Any]]) -> set[int]:
    """Numbers of cases that together hold every value; greedily, of those with most new ones the first."""
    missing = set().union(*cases)
    kept = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(cases[number] & missing))
        kept.add(best)
        missing -= cases[best]
    return kept
