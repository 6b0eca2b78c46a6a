"""Passes against the dialect's own, which jaxlib has built in: the same text from the same programs.

What we do better is kept out of the comparison: the dialect puts fragments that differ only in shardings
into one program, and fails on programs that we partition.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest

from mpmd import ir
from mpmd.options import DIALECT_DEFAULTS
from mpmd.partition import pipeline
from mpmd.passes import make_pass
from mpmd.passes.export import programs
from mpmd.passes.schedule.pipeline_scheduler import SCHEDULES
from mpmd.passes.verify import verify
from mpmd.support.passes import Watch, run_pipeline
from tests.support import dialect

BY_STAGE = ("Circular", "CircularWithReversedBackward")
NOT_COMPARED = ("ParallelPipelinesWithWrapAround",)  # forward only; its order has a unit test
WATCH = Watch(verify=verify, text=ir.to_text, verify_each=True, check_changed=True)


@pytest.fixture(scope="module", autouse=True)
def oracle() -> Any:
    return dialect.partitioner()


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - set(NOT_COMPARED)))
@pytest.mark.parametrize("seed", range(6))
def test_schedules(schedule: str, seed: int) -> None:
    rng = random.Random(f"{schedule} {seed}")
    staged = schedule in BY_STAGE
    text = dialect.pipelined(rng, staged=staged, split=not staged and rng.random() < 0.6)
    module = ir.parse(text)
    run_pipeline(module, [make_pass("mpmd-pipeline-scheduler", f"must-happen-before={schedule}")], WATCH)
    assert ir.to_text(module) == dialect.run_phase(text, "OPTIMIZE", {"mpmd_pipeline_schedule": schedule})


@pytest.mark.parametrize("seed", range(12))
def test_rematerialisation(seed: int) -> None:
    text = dialect.pipelined(random.Random(seed), staged=seed % 2 == 0, split=False)
    module = ir.parse(text)
    run_pipeline(module, [make_pass("mpmd-remat-fragment")], WATCH)
    options = {"mpmd_pipeline_schedule": "none", "mpmd_fragment_remat": True}
    assert ir.to_text(module) == dialect.run_phase(text, "OPTIMIZE", options)


@pytest.mark.parametrize("seed", range(40))
def test_propagation_and_export(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "programs", _programs_of_the_dialect)
    text = dialect.sharded(random.Random(seed))
    try:
        theirs = dialect.run_phase(text, "PARTITION")
    except RuntimeError as e:
        theirs = str(e)
    o = dataclasses.replace(DIALECT_DEFAULTS, fail_on_inferred_fragments=False)
    passes = [s.pass_ for s in pipeline.sharding_propagation_pipeline(o) + pipeline.export_pipeline(o)]
    module = ir.parse(text)
    run_pipeline(module, passes, WATCH)
    ours = re.sub(r"(fragment_call<.*?\)) \{[^}]*\} :", r"\1 :", ir.to_text(module))
    if not theirs.startswith("module"):
        assert re.search("reshard-only fragment|Transfer op has different shardings", theirs)
        return
    assert ours == theirs


def _programs_of_the_dialect(fragments: Iterable[ir.Fragment]) -> list[list[ir.Fragment]]:
    groups: dict[bytes, list[ir.Fragment]] = {}
    for fragment in fragments:
        groups.setdefault(_identity_of_the_dialect(fragment), []).append(fragment)
    return list(groups.values())


def _identity_of_the_dialect(fragment: ir.Fragment) -> bytes:
    """Which fragments the dialect takes for one program, shardings or not."""
    types = [re.sub(r", sharding=<.*>>", ">", str(v.type)) for v in (*fragment.inputs, *fragment.results)]
    attributes = [str(fragment.attributes.get(name)) for name in ("arg_attrs", "res_attrs")]
    body = ir.op_text(fragment).partition("\n")[2].rpartition("\n")[0]
    return "\n".join([fragment.mesh, *types, *attributes, body]).encode()
