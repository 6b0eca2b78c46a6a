"""Every pass with modules at moments at which it can run: by a prefix of the pipeline, or written for it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np

from mpmd import ir
from mpmd.errors import PassError
from mpmd.options import DIALECT_DEFAULTS, PipelineOptions
from mpmd.partition import pipeline
from mpmd.passes import PASSES, make_pass
from mpmd.passes.fragments.fragment_info import FragmentInfo
from mpmd.passes.verify import verify
from mpmd.support.passes import Pass, Watch, run_pipeline
from tests.support import random_mpmd
from tests.support.evaluate_mpmd import argument_shapes, entry_of
from tests.support.random_moments import MOMENTS

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


def prepared(name: str, seed: int, effects: bool = False) -> tuple[ir.Module, list[Pass]] | None:
    """A module at a moment at which the pass can run, and the pass; None if it does not come so far.

    With `effects` some of its ops have effects, each of another custom call.
    """
    if name in MOMENTS and seed % 2:
        return ir.parse(MOMENTS[name](seed)), [make_pass(name)]
    if name in FINISHES and seed % 2:
        module = ir.parse(random_mpmd.imported(seed, effects=effects))
        run_pipeline(module, [make_pass(FINISHES[name])], QUIET)
        return module, [make_pass(name)]
    make = IN_PIPELINE.get(name)
    if make is None or (name not in IMPORT_ONLY and seed % 2):
        module = ir.parse(random_mpmd.imported(seed, calls=seed % 4 == 1, effects=effects))
        return module, passes_for(name, seed, module)
    if make is IMPORT:
        module = ir.parse(random_mpmd.traced(seed, effects))
    else:
        module = ir.parse(random_mpmd.imported(seed, shardings=make is SHARDING, effects=effects))
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
