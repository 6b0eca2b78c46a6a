"""Every step of sharding propagation and export keeps what random sharded programs compute."""

from __future__ import annotations

import collections
import dataclasses
import random

import numpy as np
import pytest

from mpmd import ir
from mpmd.errors import PassError
from mpmd.options import DIALECT_DEFAULTS
from mpmd.partition import pipeline
from mpmd.passes.verify import verify
from mpmd.support.passes import Pass, Watch, run_pipeline
from tests.support import dialect
from tests.support.evaluate_mpmd import argument_shapes, evaluate

FAST, SLOW = 30, 300
STRICT = Watch(verify=verify, text=ir.to_text, verify_each=True, check_changed=True)
OPTIONS = dataclasses.replace(DIALECT_DEFAULTS, fail_on_inferred_fragments=False, copy_constants=True)

# Passes that random programs without names, tokens, and host memory must at least once change.
MUST_CHANGE = {
    "mpmd-propagate-shardings",
    "mpmd-enforce-user-shardings",
    "mpmd-extract-reshards-from-inter-mesh-transfers",
    "mpmd-convert-sdy-shardings-to-mpmd-types",
    "mpmd-simplify-program",
    "mpmd-mark-input-output-with-layouts",
    "mpmd-mark-offloaded-input-output",
    "mpmd-delay-inferred-fragments",
    "mpmd-mark-aliasing-and-donation",
    "mpmd-mark-fragment-reserved-memory",
    "mpmd-lower-to-fragment-calls",
}


def passes() -> list[Pass]:
    """Both pipelines."""
    steps = pipeline.sharding_propagation_pipeline(OPTIONS) + pipeline.export_pipeline(OPTIONS)
    return [step.pass_ for step in steps]


def check(seeds: range) -> None:
    """Runs the steps one by one, evaluating after each."""
    changed: collections.Counter[str] = collections.Counter()
    ran = 0
    for seed in seeds:
        module = ir.parse(dialect.sharded(random.Random(seed), rich=True))
        rng = np.random.default_rng(seed)
        given = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in argument_shapes(module)]
        expected = evaluate(module, given)
        for pass_ in passes():
            before = ir.to_text(module)
            try:
                run_pipeline(module, [pass_], STRICT)
            except PassError as e:
                assert "incompatible layouts" in str(e)  # the program asks for what cannot be
                break
            if ir.to_text(module) == before:
                continue
            changed[pass_.name] += 1
            for a, b in zip(expected, evaluate(module, given), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=f"seed {seed}, {pass_}\n{before}")
        else:
            ran += 1
    assert ran > len(seeds) // 2
    assert set(changed) >= MUST_CHANGE


def test_steps_keep_the_numbers() -> None:
    check(range(FAST))


@pytest.mark.slow
def test_steps_keep_the_numbers_of_many_programs() -> None:
    check(range(FAST, FAST + SLOW))
