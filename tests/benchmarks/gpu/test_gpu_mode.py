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
from benchmarks.gpu.experiment import Experiment
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.errors import CompileError
from tests.support.gpu_stand_in import install

ROOT = Path(__file__).resolve().parents[3]


def found(experiment, tmp_path, gpu, expected_errors=()):
    run = Experiment("stand-in", "", tmp_path / "found.json", True, 250.0)
    experiment(run)
    written = json.loads((tmp_path / "found.json").read_text())
    assert not gpu.broken
    assert {name: e["error"] for name, e in written["errors"].items() if name not in expected_errors} == {}
    assert {name: c for name, c in written["checks"].items() if c["state"] in ("failed", "skipped")} == {}
    return written


TARGET = [entry.name for entry in runner.EXPERIMENTS if entry.simulated]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_command_on_a_stand_in(tmp_path):
    """Every experiment on our target, as on a GPU, small: nothing fails, breaks off or is late."""
    command = [sys.executable, "benchmarks/gpu/run.py", "--out", str(tmp_path), "--stand-in"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    written = json.loads((tmp_path / "gpu.json").read_text())["experiments"]
    assert done.returncode == 0, done.stdout[-3000:]
    assert {name for name, found in written.items() if found["status"] == "compiled"} == {*TARGET}
    others = {found["status"] for name, found in written.items() if name not in TARGET}
    assert others == {"skipped: it needs a GPU"}
    for name in TARGET:
        assert written[name]["checks"] and not written[name]["errors"], name
        assert {check["state"] for check in written[name]["checks"].values()} == {"recorded"}, name
    kernels = written["target_kernels"]["figures"]
    assert kernels["kernels"]["adam"][0]["bytes"] > 0 and kernels["products"]["block_forward+backward"]
    assert written["target_gpt2"]["figures"]["step"]["launches"] > 20


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
    assert written["figures"]["dim64_T128"]["forward_backward"]["speed_against_xla"] > 0
