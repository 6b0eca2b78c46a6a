"""Which machine is this, and what limits does it have?

Method: versions of everything that the other experiments use; the driver's own words about the GPU; a large
copy and a large bf16 matrix product by XLA, on random data, between two readings of the clocks.

What the answer means: `copy_bytes_per_s` and `bf16_flops_per_s` are what a memory-bound and an
arithmetic-bound kernel can reach here; the other figures say which versions the findings belong to.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.gpu.experiment import Experiment, run_experiment
from benchmarks.gpu.pack import TravellingPack
from benchmarks.gpu.target import clocks, gpu_of
from benchmarks.gpu.timing import interleaved

PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "numpy", "llvmlite", "triton", "torch", "flax",
    "optax", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc", "numba", "pytest", "hypothesis",
)  # fmt: skip
COPY_ELEMENTS, PRODUCT = 1 << 29, 8192


def measure(run: Experiment) -> None:
    """Finds it out."""
    run.figure("python", platform.python_version())
    for name in PACKAGES:
        try:
            run.figure(f"packages.{name}", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            run.figure(f"packages.{name}", None)
    with run.part("interface"):
        header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
        found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
        run.figure("xla_ffi", f"{found['MAJOR']}.{found['MINOR']}")
    if not (run.gpu or run.simulated):
        run.skip("ceilings", "no GPU")
        return
    with run.part("device"):
        gpu = gpu_of(run)
        facts = {"name": gpu.driver.name, "capability": gpu.driver.capability, "cuda": gpu.driver.version}
        for name, value in (facts | dataclasses.asdict(gpu.driver.facts)).items():
            run.figure(f"device.{name}", value)
        run.figure("cublaslt_version", gpu.cublaslt.version)
        if TravellingPack(run.pack).is_here:
            made = TravellingPack(run.pack).facts
            run.figure("pack", {k: v for k, v in made.items() if k != "refused"})
            run.check("the pack is for this GPU", made["capability"] == gpu.driver.capability, made["gpu"])
    run.figure("clocks_before", clocks())
    with run.part("ceilings"):
        _ceilings(run)
    run.figure("clocks_after", clocks())
    if run.gpu:
        with run.part("memory"):
            run.figure("memory_stats", jax.devices()[0].memory_stats())


def _ceilings(run: Experiment) -> None:
    elements, side = (COPY_ELEMENTS, PRODUCT) if run.gpu else (1 << 10, 32)
    key = jax.random.key(0)
    bits = jax.random.bits(key, (elements,), jnp.uint32)
    flip = jax.jit(lambda x: ~x)
    a, b = jax.random.normal(key, (2, side, side), jnp.bfloat16)
    calls = {"copy": lambda: flip(bits), "product": lambda: jnp.dot(a, b)}
    times = interleaved(calls, rounds=4, seconds=0.05 if run.gpu else 0.0)
    run.figure("copy_bytes_per_s", 8.0 * elements / times["copy"].median, "B/s")
    run.figure("bf16_flops_per_s", 2.0 * side**3 / times["product"].median, "FLOP/s")


if __name__ == "__main__":
    run_experiment("environment", __doc__, measure)
