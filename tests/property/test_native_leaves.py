"""Native code of random programs whose conditionals and loops carry 20 and more leaves, on poisoned memory.

Each against the evaluator, whole or cut into two fragments, its arguments donated or not.  A failure names
the seed of its program: `python -m tests.support.random_hlo.leaves --first SEED --count 1` runs it again, and
more programs with a larger count.
"""

import secrets

import pytest

from tests.support.native_hlo import quick_code
from tests.support.random_hlo.leaves.agreement import disagreement, one_way
from tests.support.xla_hlo import XlaWorker

FAST = 150
"""Programs with fixed seeds, of which every test run has the first part."""
PART = 15
SLOW = 400
"""New programs in each part of the slow test."""
OPTIMIZED = 50
"""More of them, compiled as for users."""


def sweep(problems) -> None:
    """No program may differ, and none be refused."""
    found = [p for p in problems if p]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(PART, FAST, PART))]
)
def test_leaves_of_branches_and_loops_stay_apart(first):
    with quick_code():
        sweep(disagreement(seed, ways=[one_way(seed)]) for seed in range(first, first + PART))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_leaves_of_new_programs_stay_apart(part):
    first = secrets.randbits(40)
    with XlaWorker() as xla:
        with quick_code():
            sweep(disagreement(first + k, xla if k % 10 == 0 else None) for k in range(SLOW))
        sweep(disagreement(first + k) for k in range(SLOW, SLOW + OPTIMIZED))
