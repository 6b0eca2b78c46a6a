"""Each pass that moves, repeats, drops or orders ops, on programs made for it: values and effects stay."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from mpmd import ir
from mpmd.errors import PassError
from mpmd.support.passes import run_pipeline
from tests.support.directed import seeds
from tests.support.directed.effects import DIRECTED, program
from tests.support.evaluate_mpmd import Effects, evaluate
from tests.support.pass_programs import STRICT, arguments

FAST, SLOW, PARTS = 4, 2000, 10


def check(name: str, some: range) -> None:
    """Runs a pass on programs of which it must change at least half."""
    changed = 0
    for seed in some:
        found = program(name, seed)
        if found is None:
            continue
        module, passes = found
        given, text = list(arguments(module)), ir.to_text(module)
        done_before: Effects = collections.Counter()
        done_after: Effects = collections.Counter()
        before = evaluate(module, given, done_before)
        try:
            run_pipeline(module, passes, STRICT)
        except PassError:
            continue
        changed += ir.to_text(module) != text
        after = evaluate(module, given, done_after)
        for i, (a, b) in enumerate(zip(before, after)):  # a pass may add results, behind the others
            np.testing.assert_array_equal(a, b, f"seed {seed}, {passes[0]}, result {i} of\n{text}")
        assert len(after) >= len(before)
        assert done_after == done_before, f"seed {seed}, {passes[0]}:\n{text}"
    assert 2 * changed >= len(some), f"{name} changed {changed} of {len(some)} programs"


@pytest.mark.parametrize("name", DIRECTED)
def test_effects_and_values(name: str) -> None:
    check(name, seeds(FAST))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", DIRECTED)
def test_effects_and_values_of_many_programs(name: str, part: int) -> None:
    size = SLOW // PARTS
    check(name, seeds(SLOW)[part * size : part * size + size])
