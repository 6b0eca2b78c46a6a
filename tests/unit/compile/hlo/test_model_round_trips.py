"""The steps of all test models as HLO text: what XLA dumps is read by us, what our passes make by XLA."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from mpmd.compile.hlo import print_module, verify
from mpmd.compile.lowering import lower
from mpmd.compile.pipelines import GROUPS
from mpmd.support.pass_pipeline import Watch, run_pipeline
from tests.support.comparing import relative_difference
from tests.support.hlo_meaning import evaluate
from tests.support.hlo_round_trips import EVERY, NAMES, round_trips, step_of
from tests.support.xla_hlo import ROOT

WATCH = Watch(verify=verify, text=print_module, verify_each=True, check_changed=True)


@pytest.mark.parametrize("name", NAMES)
def test_xlas_text_before_and_after_its_passes(name, xla):
    step, arguments = step_of(name)
    lowered = step.lower(*arguments)
    round_trips(lowered.compiler_ir("hlo").as_hlo_module().to_string(), xla, f"{name} before")
    round_trips(lowered.compile().as_text(), xla, f"{name} after")


@pytest.mark.parametrize("name", NAMES)
def test_our_text_after_each_group_of_passes(name, xla):
    step, arguments = step_of(name)
    module = lower(step.lower(*arguments).compiler_ir("stablehlo"))
    leaves = [np.asarray(a) for a in jax.tree.leaves(arguments)]
    leaves = [a.astype(p.shape.numpy_dtype) for a, p in zip(leaves, module.entry.parameters, strict=True)]
    wanted = jax.tree.leaves(step(*arguments))
    for group, make in GROUPS.items():
        before = len(module)
        run_pipeline(module, make(), WATCH)
        round_trips(print_module(module), xla, f"{name} after {group}")
        got = jax.tree.leaves(evaluate(module, leaves))
        tolerance = max(EVERY[name].tolerance, 2e-5)
        assert relative_difference(got, wanted) <= tolerance, f"{group}: {before} to {len(module)}"


DUMPING = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_dump_hlo_pass_re=.* --xla_dump_large_constants --xla_dump_to=" + sys.argv[1]
from tests.support.hlo_round_trips import EVERY, step_of
for name in EVERY:
    step, arguments = step_of(name)
    step.lower(*arguments).compile()
"""


@pytest.mark.slow
def test_every_text_that_xla_dumps(tmp_path, xla):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", DUMPING, str(tmp_path)], check=True, cwd=ROOT, env=environment)
    texts = {p.name: p.read_text() for p in sorted(tmp_path.glob("*.txt"))}
    texts = {name: text for name, text in texts.items() if text.startswith("HloModule")}
    steps = {name.split(".")[0] for name in texts}
    assert len(steps) >= len(EVERY) and len(texts) > 20 * len(EVERY)
    known: set[str] = set()
    for name, text in texts.items():
        body = text.partition("\n")[2]
        if body not in known:  # many passes change nothing but the name of the dump
            known.add(body)
            round_trips(text, xla, name)
