"""Which cases `make test` runs of a test that has many."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fast_cases import each_value, mark_slow_cases

SETTINGS = list(itertools.product((1, 40, 768), ("f32", "bf16"), (False, True)))


class CollectedTest:
    """As much of a collected test as is looked at."""

    def __init__(self, settings: tuple[Any, ...], *args: Any, slow: bool = False) -> None:
        name = "-".join(map(str, settings))
        self.nodeid = f"tests/test_rows.py::test_rows[{name}]"
        self.callspec = SimpleNamespace(id=name, params=dict(enumerate(settings)))
        self.marks = {"fast_cases": SimpleNamespace(args=args)} | ({"slow": None} if slow else {})

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name) or (name in self.marks and name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = None


def fast(*args: Any) -> list[str]:
    cases = [CollectedTest(settings, *args) for settings in SETTINGS]
    mark_slow_cases(cases)
    return [case.callspec.id for case in cases if "slow" not in case.marks]


def test_without_arguments_each_value_of_each_parameter_occurs() -> None:
    assert fast() == ["1-f32-False", "40-bf16-True", "768-f32-False"]


def test_a_number_of_cases_is_spread_evenly() -> None:
    assert fast(3) == ["1-f32-False", "40-f32-False", "768-f32-False"]
    assert fast(100) == fast(12) != fast(11)


def test_cases_are_named_by_their_ids() -> None:
    assert fast("40-f32-True", "1-f32-False") == ["1-f32-False", "40-f32-True"]
    with pytest.raises(pytest.UsageError, match=r"names \['2-f32-True'\], and the cases are"):
        fast("2-f32-True", "1-f32-False")


def test_some_cases_alone_may_lack_those_that_are_named() -> None:
    (case,) = cases = [CollectedTest(SETTINGS[0], "40-f32-True")]
    mark_slow_cases(cases, whole=False)
    assert "slow" in case.marks


def test_slow_cases_stay_slow_and_do_not_count() -> None:
    cases = [CollectedTest(SETTINGS[0], slow=True), CollectedTest(SETTINGS[0])]
    mark_slow_cases(cases)
    assert ["slow" in case.marks for case in cases] == [True, False]


def test_a_case_that_is_named_stays_fast() -> None:
    cases = [CollectedTest(settings, 1) for settings in SETTINGS[:3]]
    mark_slow_cases(cases, named={cases[2].nodeid})
    assert ["slow" in case.marks for case in cases] == [False, True, False]


def test_values_that_only_later_cases_have_are_found() -> None:
    assert each_value([{"a"}, {"b"}, {"c"}, {"b", "c", "d"}]) == {0, 3}
