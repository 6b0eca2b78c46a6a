"""Experiments in their GPU mode, on stand-ins: the first GPU that they meet must find no slip of theirs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import cublaslt_epilogues, flash_attention
from benchmarks.gpu import run as runner
from benchmarks.gpu.cublaslt import Product
from benchmarks.gpu.experiment import Experiment, read_lines
from benchmarks.gpu.pack import MAX_PACK_BYTES
from benchmarks.gpu.whole_step import kernels_in
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.errors import CompileError
from tests.benchmarks.gpu.stand_in import install

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = ("--stand-in", "tests.support.simulated_gpu:StandInGpu")


def found(experiment, tmp_path, gpu, expected_errors=()):
    run = Experiment("stand-in", "", tmp_path / "found.jsonl", True, 250.0)
    experiment(run)
    written = read_lines(tmp_path / "found.jsonl")["stand-in"]
    assert not gpu.broken
    assert {name: e["error"] for name, e in written["errors"].items() if name not in expected_errors} == {}
    assert {name: c for name, c in written["checks"].items() if c["state"] in ("failed", "skipped")} == {}
    return written


CALLS = {  # each of which is one command
    "first": [entry.name for entry in runner.EXPERIMENTS if entry.first],
    "second": ["whole_step", "target_example", "shared_device"],
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Small programs and variants, prepared for a stand-in."""
    folder = tmp_path_factory.mktemp("pack")
    command = [sys.executable, "benchmarks/gpu/prepare.py", "--out", str(folder), *STAND_IN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["variants"] == 24 and {"chain", "loop", "step"} <= set(facts["programs"])
    assert 0 < facts["bytes"] < MAX_PACK_BYTES
    return folder


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("call", CALLS)
def test_the_command_on_a_stand_in(call, pack, tmp_path):
    """Both calls, as on a GPU, small: nothing fails, breaks off or is late."""
    command = [sys.executable, "benchmarks/gpu/run.py", "--out", str(tmp_path), "--pack", str(pack)]
    only = [] if call == "first" else ["--only", ",".join(CALLS[call])]
    command += [*STAND_IN, "--budget", "280", *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    written = read_lines(tmp_path / "gpu.jsonl")
    assert done.returncode == 0, done.stdout[-3000:]
    assert sorted(written) == sorted(CALLS[call])
    target = [name for name in CALLS[call] if name != "shared_device"]
    assert {name for name, found in written.items() if found["status"] == "compiled"} == {*target}
    for name in target:
        assert written[name]["figures"] and not written[name]["errors"], name
        assert {check["state"] for check in written[name]["checks"].values()} <= {"recorded", "skipped"}, name
    if call == "second":
        assert written["shared_device"]["status"] == "skipped: it needs a GPU"
        assert set(written["whole_step"]["figures"]) >= {"ms.ours", "ms.graph", "ms.xla", "kernels.ours"}
        return
    assert {"chain equals jax.jit", "code that does not load is an error"} <= set(written["smoke"]["checks"])
    launches = written["step_launches"]["figures"]
    assert len(launches["sequence_us"]) > 20 and launches["graph"]["done_us"] > 0
    assert sum(row["count"] for name, row in launches.items() if name.startswith("launch.")) == len(
        launches["sequence_us"]
    )
    variants = [name for name in written["kernel_variants"]["figures"] if name.startswith("variant.")]
    assert len(variants) == 24 and sum(name.endswith(".own") for name in variants) > 2


def test_kernels_in_a_trace():
    """Only what ran on a stream of a GPU; two that overlap are busy once."""

    def named(what, name, **ids):
        return {"ph": "M", "name": what, "args": {"name": name}, **ids}

    def ran(name, at, dur, pid=1):
        return {"ph": "X", "name": name, "ts": at, "dur": dur, "pid": pid, "tid": 3}

    events = [
        named("process_name", "/device:GPU:0", pid=1),
        named("thread_name", "Stream #13", pid=1, tid=3),
        named("process_name", "/host:CPU", pid=2),
        named("thread_name", "Stream of a host", pid=2, tid=3),
        *(ran("a", 10.0, 4.0), ran("b", 12.0, 4.0), ran("a", 20.0, 1.0), ran("c", 0.0, 99.0, pid=2)),
    ]
    found = kernels_in(events)
    assert found == {"kernels": 3, "busy_us": 7.0, "span_us": 11.0, "rows": [("a", 2, 5.0), ("b", 1, 4.0)]}


def _has_cublaslt():
    try:
        return CudaLibraries().cublaslt is not None
    except CompileError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _has_cublaslt(), reason="cuBLASLt is not installed")
def test_cublaslt_epilogues(monkeypatch, tmp_path):
    gpu = install(monkeypatch, cublaslt_epilogues)
    monkeypatch.setattr(cublaslt_epilogues, "SHAPES", ((64, 32, 128),))
    monkeypatch.setattr(cublaslt_epilogues.CublasLt, "create", lambda self: None)

    def propose(self, most=8):
        gpu.products[self.descriptor.value] = self.problem
        return 2

    monkeypatch.setattr(Product, "propose", propose)
    written = found(cublaslt_epilogues.measure, tmp_path, gpu)
    assert len(written["figures"]) == 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_flash_attention(monkeypatch, tmp_path):
    gpu = install(monkeypatch, flash_attention)
    for name, value in (
        ("TOKENS", 256),
        ("FEATURES", 256),
        ("TUNED_AT", 128),
        ("SIZES", ((64, 128), (128, 128))),
    ):
        monkeypatch.setattr(flash_attention, name, value)
    gpu.images = 2
    without_cudnn = [f"dim{dim}_T128 cudnn works" for dim in (64, 128)]
    written = found(flash_attention.measure, tmp_path, gpu, without_cudnn)
    assert written["figures"]["dim64_T128.forward_backward.speed_against_xla"] > 0
