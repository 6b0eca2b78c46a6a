"""Whole training steps: text both ways with XLA, speed, XLA's own live ranges and costs."""

import gzip
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from mpmd.compile.analysis.dataflow import Dataflow
from mpmd.compile.analysis.liveness import LiveRange, Occupancy, merged
from mpmd.compile.cost.hlo_cost import CostModel
from mpmd.compile.hlo import fingerprint, parse_module, print_module, verify
from mpmd.compile.lowering import lower
from tests.support.hlo_aliases import shared_buffers
from tests.support.transformer_step import transformer_step
from tests.support.xla_hlo import ROOT, XlaWorker

DUMPS = sorted((ROOT.parent / "shared" / "conformance" / "hlo").glob("*.txt.gz"))


def round_trips(text: str, xla: XlaWorker, name: str = "") -> None:
    module = parse_module(text, name)
    verify(module)
    printed = print_module(module)
    again = parse_module(printed)
    assert print_module(again) == printed
    mark = fingerprint(module)
    assert fingerprint(again) == mark == fingerprint(module.clone())
    assert fingerprint(parse_module(xla.parse(printed))) == mark
    annotated = print_module(module, metadata=True)
    assert print_module(parse_module(annotated), metadata=True) == annotated


@pytest.mark.fast_cases(2)
@pytest.mark.skipif(not DUMPS, reason="the conformance files are not here")
@pytest.mark.parametrize("path", DUMPS, ids=lambda p: p.name)
def test_public_training_steps(path: Path, xla):
    text = gzip.decompress(path.read_bytes()).decode()
    round_trips(text, xla, path.name)


@pytest.fixture(scope="module")
def lowered():
    step, arguments = transformer_step()
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments)


@pytest.mark.slow
def test_a_transformer_step_before_and_after_optimisation(lowered, xla):
    round_trips(lowered.compiler_ir("hlo").as_hlo_module().to_string(), xla, "before")
    compiled = lowered.compile()
    round_trips(compiled.as_text(), xla, "after")


def test_a_transformer_step_lowered_by_us(lowered, xla):
    from tests.support.hlo_meaning import evaluate

    module = lower(lowered.compiler_ir("stablehlo"))
    round_trips(print_module(module), xla)
    step, arguments = transformer_step()
    got = evaluate(module, [np.asarray(a) for a in jax.tree.leaves(arguments)])
    want = jax.tree.leaves(jax.jit(step)(*arguments))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_reading_is_fast(lowered):
    text = lowered.compile().as_text()
    module = parse_module(text)
    best = min(_seconds(lambda: parse_module(text)) for _ in range(3))
    assert len(module) / best > 20_000, f"{len(module) / best:.0f} instructions a second"


def _seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


DUMPING = """
import os, sys
flags = ["--xla_dump_to=" + sys.argv[1], "--xla_dump_hlo_pass_re=.*", "--xla_dump_large_constants"]
os.environ["XLA_FLAGS"] = " ".join(flags)
import jax
from tests.support.transformer_step import transformer_step
step, arguments = transformer_step()
jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", DUMPING, str(folder)], check=True, cwd=ROOT, env=environment)
    return folder


@pytest.mark.slow
def test_every_pass_dump_of_xla(dumps, xla):
    texts = [p for p in sorted(dumps.glob("*.txt")) if p.read_text().startswith("HloModule")]
    assert len(texts) > 20
    for path in texts:
        round_trips(path.read_text(), xla, path.name)


@pytest.mark.slow
def test_buffers_are_in_use_when_xla_says(dumps):
    """Value by value the lists differ: to XLA a loop's state is three values, to us one with a hole."""
    path = max(dumps.glob("*cpu_after_optimizations.txt"), key=lambda p: p.stat().st_size)
    listing = path.with_name(path.stem + "-live-range.txt").read_text()
    listing = listing[listing.index("BufferLiveRange") :]
    theirs = re.findall(r"^    ([\w.\-]+\{[\d,]*\}):(\d+)-(\d+)$", listing, re.MULTILINE)
    module = parse_module(path.read_text(), path.name)
    flow = Dataflow(module)
    occupancy, buffers = Occupancy(flow), shared_buffers(flow)
    holder = {
        f"{instruction.name}{{{','.join(map(str, index))}}}": number
        for number, values in enumerate(buffers)
        for value in values
        for instruction, index in value.positions
    }
    tuples = {f"{i.name}{{}}" for i in module.instructions() if i.shape.is_tuple}
    spans: dict[int, list[LiveRange]] = {}
    for name, start, end in theirs:
        if name not in tuples:
            spans.setdefault(holder[name], []).append(LiveRange(int(start), int(end)))
    assert len(spans) == len(buffers) > 100
    assert {b: occupancy.together(buffers[b]) for b in spans} == {b: merged(s) for b, s in spans.items()}


@pytest.mark.slow
def test_costs_are_those_of_xla(lowered):
    from jaxlib import _hlo, _jax

    module = lower(lowered.compiler_ir("stablehlo"))
    theirs = _jax.hlo_module_cost_analysis(
        jax.devices()[0].client, _hlo.hlo_module_from_text(print_module(module))
    )
    ours = CostModel().module(module)
    assert ours.flops == pytest.approx(theirs["flops"], rel=2e-2)
    assert ours.transcendentals == pytest.approx(theirs["transcendentals"], rel=2e-2)
    assert ours.bytes == pytest.approx(theirs["bytes accessed"], rel=5e-2)
