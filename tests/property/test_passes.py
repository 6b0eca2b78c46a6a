"""Every pass keeps what a program computes, leaves it valid, and says truly whether it changed it."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd import ir
from mpmd.errors import ConfigError, PassError
from mpmd.partition import pipeline
from mpmd.passes import PASSES, make_pass
from mpmd.support.passes import Pass, run_pipeline
from tests.support import random_mpmd
from tests.support.evaluate_mpmd import evaluate
from tests.support.pass_programs import (
    EXPORT,
    FINISHES,
    IMPORT,
    QUIET,
    SHARDING,
    STRICT,
    arguments,
    options,
    prepared,
)
from tests.support.random_moments import MOMENTS

FAST, SLOW = 24, 300

# If one of these changes none of many modules, it is the random modules that are too poor to test it.
_EXERCISED = """
    absorb-inferred-fragments call-inline convert-sdy-shardings-to-mpmd-types copy-constants
    copy-topology-from-main delay-inferred-fragments delay-transfers-from-cpu
    erase-unused-callee-block-arguments fragment-dce fragment-dedup from-unroll-to-call-counter
    infer-mesh-assign-mesh-func-leaves infer-mesh-convert-reduce-ops infer-mesh-finalize
    infer-mesh-populate-src-set infer-mesh-populate-use-set infer-mesh-rewrite-using-analysis inline
    inline-nested-user-exposed-ops introduce-transfers lower-to-fragment-calls map-input-output-to-mesh
    map-named-ops-to-mpmd-ops mark-aliasing-and-donation mark-fragment-reserved-memory
    merge-forward-with-backward merge-inferred-by-round merge-inferred-fragments merge-transfers
    merge-user-fragments-into-scheduling-units move-transfers-to-producer order-by-tasks
    pipeline-scheduler remat-fragment remove-transfer-cycles rule-based-merge rule-based-schedule
    simplify-named-computations simplify-stablehlo sink-negligible-ops-into-call-op
    split-and-prioritize-transfer-independent-computations split-bwd-fragments
    swap-transposed-dots uniquify-carried-values uniquify-function-inputs-outputs
    unroll-for-loops
"""
EXERCISED = frozenset("mpmd-" + name for name in _EXERCISED.split()) | MOMENTS.keys() | FINISHES.keys()


def check(name: str, seeds: range, wanted: int) -> None:
    """Runs a pass on one module per seed, until it has run on `wanted` modules and changed one if it can."""
    ran = changed = 0
    for seed in seeds:
        if ran >= wanted and (changed or name not in EXERCISED):
            break
        found = prepared(name, seed)
        if found is None:
            continue
        module, passes = found
        given = list(arguments(module))
        before, text = evaluate(module, given), ir.to_text(module)
        try:
            run_pipeline(module, passes, STRICT)
        except PassError:
            continue
        ran += 1
        changed += ir.to_text(module) != text
        after = evaluate(module, given)
        assert len(before) == len(after), f"seed {seed}, {passes[0]}"
        for i, (a, b) in enumerate(zip(before, after)):
            np.testing.assert_array_equal(a, b, f"seed {seed}, {passes[0]}, result {i} of\n{text}")
    assert ran >= wanted, f"{name} ran on {ran} of {len(seeds)} modules only"
    assert changed or name not in EXERCISED, f"{name} changed none of {ran} modules"


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_the_numbers(name: str) -> None:
    check(name, range(FAST), wanted=FAST // 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_the_numbers_of_many_modules(name: str) -> None:
    check(name, range(FAST, FAST + 8 * SLOW), wanted=SLOW)


def steps_of(seed: int, module: ir.Module) -> list[Pass]:
    """All four pipelines, in order."""
    chosen = options(seed, module)
    makers = (IMPORT, pipeline.optimize_pipeline, SHARDING, EXPORT)
    return [step.pass_ for make in makers for step in make(chosen)]


@pytest.mark.parametrize("seed", range(20))
def test_the_pipelines_keep_the_numbers(seed: int) -> None:
    module = ir.parse(random_mpmd.traced(seed))
    given = list(arguments(module))
    before = evaluate(module, given)
    run_pipeline(module, steps_of(seed, module), QUIET)
    for a, b in zip(before, evaluate(module, given), strict=True):
        np.testing.assert_array_equal(a, b)


def test_options_that_no_pass_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no option"):
        make_pass("mpmd-fragment-dce", "no-such-option=1")
