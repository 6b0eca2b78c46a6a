"""Every pass keeps what a program computes, leaves it valid, and says truly whether it changed it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest

from mpmd import ir, pipeline
from mpmd.errors import ConfigError, PassError
from mpmd.options import DIALECT_DEFAULTS, PipelineOptions
from mpmd.passes import PASSES, make_pass
from mpmd.passes.fragments.fragment_info import FragmentInfo
from mpmd.passes.verify import verify
from mpmd.support.passes import Pass
from mpmd.support.pipeline import Watch, run_pipeline
from tests.support import random_mpmd
from tests.support.evaluate_mpmd import argument_shapes, entry_of, evaluate
from tests.support.random_moments import MOMENTS

FAST, SLOW = 24, 300

STRICT = Watch(verify=verify, text=ir.to_text, verify_each=True, check_changed=True)
QUIET = Watch(verify=verify, text=ir.to_text)

IMPORT = pipeline.import_pipeline
SHARDING = pipeline.sharding_propagation_pipeline
EXPORT = pipeline.export_pipeline

# Only these take modules with names and plain tensors; all others also take fragments and transfers.
IN_PIPELINE = {
    step.pass_.name: make
    for make in (IMPORT, SHARDING, EXPORT)
    for step in make(
        dataclasses.replace(
            DIALECT_DEFAULTS,
            constraints=("0:0",),
            heterogeneous_meshes=True,
            carry_sums=True,
            split_accumulators=True,
            keep_microbatches_equal=True,
            recompute_cheap_residuals=True,
            copy_constants=True,
            merge_transfers=True,
        )
    )
}
IMPORT_ONLY = {name for name, kind in PASSES.items() if ".passes.import_." in kind.__module__}
VARIANTS = {
    "mpmd-absorb-inferred-fragments": ["", "absorb-on-entry-point-function=true"],
    "mpmd-merge-inferred-fragments": [
        "", "merge-any-consumer=true", "merge-sideways=true", "clone-inferred-fragments=true",
        "keep-microbatches-equal=true",
    ],
    "mpmd-uniquify-function-inputs-outputs": ["", "use-transfer-instead-of-fragment=true"],
    "mpmd-pipeline-scheduler": [
        f"must-happen-before={name}" for name in ("GPipe", "1F1B", "ZeroBubbleH1", "Circular", "none")
    ],
    "mpmd-order-by-tasks": ["orders=m1:0F0,0F1,0B0,0B1;m2:1F0,1B0,1F1,1B1"],
    "mpmd-remat-fragment": ["", "merge-remat-fragments=true"],
    "mpmd-validate-no-inferred-fragments": ["fail-on-inferred-fragments=false"],
}  # fmt: skip
# What the second did is undone by the first.
FINISHES = {"mpmd-forget-carried-starts": "mpmd-uniquify-carried-values"}
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


def options(seed: int, module: ir.Module) -> PipelineOptions:
    """How a module goes through the pipelines."""
    entry = entry_of(module)
    pairs = [
        f"{i}:{o}"
        for i, arg in enumerate(entry.args)
        for o, value in enumerate(entry.returned)
        if arg.type == value.type
    ]
    rng = random.Random(seed)
    coin = lambda: rng.random() < 0.5  # noqa: E731
    return dataclasses.replace(
        DIALECT_DEFAULTS,
        name_to_mesh_assignment=random_mpmd.assignment(seed),
        input_assignment=("0@m1",) if coin() else (),
        constraints=tuple(pairs[:1]),
        infer_transfers=coin() or coin(),
        max_clones=rng.randint(1, 3),
        carry_sums=True,
        split_accumulators=True,
        keep_microbatches_equal=True,
        recompute_cheap_residuals=True,
        copy_constants=True,
        merge_transfers=True,
        fail_on_inferred_fragments=False,
        heterogeneous_meshes=seed % 3 == 0,
    )


def rules(module: ir.Module, seed: int, text: str, join: str) -> str:
    """A rule about two fragments of one mesh, or nothing if there are no two that infos tell apart."""
    infos = [FragmentInfo.of(op) for f in ir.funcs(module) for op in ir.fragments(f) if op.is_user]
    infos = [info for info in infos if infos.count(info) == 1 and info.stage is None]
    random.Random(seed).shuffle(infos)
    for i, a in enumerate(infos):
        for b in infos[i + 1 :]:
            if a.mesh_name == b.mesh_name:
                return "rules=" + text.format(join.join((str(a), str(b))), a.mesh_name)
    return ""


def passes_for(name: str, seed: int, module: ir.Module) -> list[Pass]:
    """The pass with options that suit the module."""
    if name == "mpmd-rule-based-merge":
        rule = 'FragmentMergeRule(sources=[{}],target=FragmentInfo(origins=["q"],mesh_name="{}"))'
        return [make_pass(name, rules(module, seed, rule, ","))]
    if name == "mpmd-rule-based-schedule":
        return [make_pass(name, rules(module, seed, "FragmentScheduleRule(ordered_fragments=[{}])", "->"))]
    variants = VARIANTS.get(name, [""])
    return [make_pass(name, variants[seed % len(variants)])]


def prepared(name: str, seed: int) -> tuple[ir.Module, list[Pass]] | None:
    """A module at a moment at which the pass can run, and the pass; None if it does not come so far."""
    if name in MOMENTS and seed % 2:
        return ir.parse(MOMENTS[name](seed)), [make_pass(name)]
    if name in FINISHES and seed % 2:
        module = ir.parse(random_mpmd.imported(seed))
        run_pipeline(module, [make_pass(FINISHES[name])], QUIET)
        return module, [make_pass(name)]
    make = IN_PIPELINE.get(name)
    if make is None or (name not in IMPORT_ONLY and seed % 2):
        module = ir.parse(random_mpmd.imported(seed, calls=seed % 4 == 1))
        return module, passes_for(name, seed, module)
    if make is IMPORT:
        module = ir.parse(random_mpmd.traced(seed))
    else:
        module = ir.parse(random_mpmd.imported(seed, shardings=make is SHARDING))
    steps = [step.pass_ for step in make(options(seed, module))]
    places = [i for i, step in enumerate(steps) if step.name == name]
    if not places:
        return None
    place = random.Random(seed).choice(places)
    try:
        run_pipeline(module, steps[:place], QUIET)
    except PassError:
        return None
    return module, [steps[place]]


def arguments(module: ir.Module) -> Iterator[np.ndarray]:
    """Small integers, no two arguments equal."""
    for i, shape in enumerate(argument_shapes(module)):
        yield np.arange(1, 1 + int(np.prod(shape)), dtype=np.int32).reshape(shape) * (i + 2) - 5


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
