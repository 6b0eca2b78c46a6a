"""Experiments in their GPU mode, on a stand-in: the first GPU that they meet must not find a slip of
theirs."""

import importlib.util
import json

import pytest

from benchmarks.gpu import command_buffer, cublaslt_epilogues, flash_attention, handler_launch, plan_kernels
from benchmarks.gpu.cublaslt import Product
from benchmarks.gpu.driver import GpuError, nvidia_library
from benchmarks.gpu.experiment import Experiment
from tests.support.gpu_stand_in import install


def found(experiment, tmp_path, gpu, expected_errors=()):
    run = Experiment("stand-in", "", tmp_path / "found.json", True, 250.0)
    experiment(run)
    written = json.loads((tmp_path / "found.json").read_text())
    assert not gpu.broken
    assert {name: e["error"] for name, e in written["errors"].items() if name not in expected_errors} == {}
    assert {name: c for name, c in written["checks"].items() if c["state"] in ("failed", "skipped")} == {}
    return written


@pytest.mark.slow
def test_handler_launch(monkeypatch, tmp_path):
    gpu = install(monkeypatch, handler_launch)
    monkeypatch.setattr(handler_launch, "LARGE", 1 << 16)
    monkeypatch.setattr(handler_launch, "CHECKED", 1 << 12)
    written = found(handler_launch.measure, tmp_path, gpu)
    assert "boundary_us" in written["figures"]
    assert written["checks"]["calls are in order with XLA's work"]["state"] == "passed"


@pytest.mark.slow
def test_command_buffer(monkeypatch, tmp_path):
    gpu = install(monkeypatch, command_buffer)
    written = found(command_buffer.measure, tmp_path, gpu)
    assert written["figures"]["captured"]["loop"] is False
    assert set(written["figures"]["us_per_launch"]) == {*command_buffer.VARIANTS, "xla", "xla_without_graphs"}


@pytest.mark.slow
def test_plan_kernels(monkeypatch, tmp_path):
    gpu = install(monkeypatch, plan_kernels)
    monkeypatch.setattr(plan_kernels, "SIZE", 1 << 16)
    printed = plan_kernels.print_plan

    def remember(plan, arch):
        kernel = printed(plan, arch)
        gpu.plans[plan.name] = kernel.plan
        return kernel

    monkeypatch.setattr(plan_kernels, "print_plan", remember)
    written = found(plan_kernels.measure, tmp_path, gpu)
    assert written["figures"]["gelu_f32"]["speed"] > 0


def _has_cublaslt():
    try:
        nvidia_library("libcublasLt.so")
    except GpuError:
        return False
    return True


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
