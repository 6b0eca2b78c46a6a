"""Native code where a value is computed more than once, compared with itself, or made discrete."""

import pytest

from tests.support import native_fragments
from tests.support.directed import seeds
from tests.support.directed.numbers import computes_twice, numbers
from tests.support.native_hlo import compile_module
from tests.support.random_hlo.draft import Case
from tests.support.random_hlo.sweeping import sweep

FAST, SLOW = 30, 2000


def check(count):
    """No difference to the evaluator; most programs compute some value twice."""
    accepted = 0

    def run(case: Case):
        nonlocal accepted
        fragment, made = compile_module(case.module)
        accepted += computes_twice(made)
        return native_fragments.run(fragment, case.arguments, made)

    sweep(map(numbers, seeds(count)), run)
    assert accepted >= 0.6 * count


@pytest.mark.optimized
def test_values_are_one_number_wherever_they_are_computed():
    check(FAST)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_values_are_one_number_in_many_programs():
    check(SLOW)
