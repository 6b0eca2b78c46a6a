"""Kernels of random HLO programs, by Triton's interpreter, against the evaluator; `make test-gpu`.

No kernel may leave its arrays, which begin at multiples of 16 bytes alone.
"""

import functools
import importlib.util
import re

import pytest

from mpmd.errors import CompileError
from tests.support.directed import seeds
from tests.support.directed.attention import case, recipe, wrong
from tests.support.gpu_hlo import run_module_on_gpu
from tests.support.random_hlo import NATIVE_FAMILIES, random_case
from tests.support.random_hlo.rewritable import rewritable
from tests.support.random_hlo.sweeping import compare
from tests.support.random_hlo.wide import wide

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)
FAST, SLOW = 2, 40
"""Cases of each family."""
REFUSED = re.compile(
    r"GPUs do not combine|no GPU kernel adds up rows|has no kernel|no kernel calls|there is no "
)
"""What XLA is left with."""


def problem(case):
    """What differs; "" for nothing, and for programs that GPUs have no code for."""
    try:
        return compare(case, lambda case: run_module_on_gpu(case.module, case.arguments))
    except CompileError as error:
        return "" if REFUSED.search(str(error)) else f"{case.name}: {error}"


def sweep(cases):
    """None may differ."""
    problems = [found for case in cases if (found := problem(case)) and not REFUSED.search(found)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_kernels_compute_as_the_evaluator(family):
    sweep(random_case(family, seed) for seed in range(FAST))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_many_kernels_compute_as_the_evaluator(family):
    sweep(random_case(family, seed) for seed in range(1000, 1000 + SLOW))


@pytest.mark.parametrize("seed", range(2))
def test_programs_of_all_types(seed):
    sweep([wide(seed, 25)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1040, 10))
def test_many_programs(first):
    sweep(make(seed) for seed in range(first, first + 10) for make in (wide, rewritable))


def sweep_attention(numbers):
    """What f64 gives; rows that see no key, and fillers of any size."""
    made = [recipe(seed) for seed in numbers]
    problems = [wrong(m, functools.partial(run_module_on_gpu, case(m).module)) for m in made]
    assert not any(problems), "\n".join(filter(None, problems))


def test_attention_is_what_f64_gives():
    sweep_attention([0, 1, 2, 63])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_much_attention_is_what_f64_gives():
    sweep_attention(seeds(1000))
