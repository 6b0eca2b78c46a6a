"""Which machine is this, and what limits does it have?

Method: versions of everything that the other experiments use; the driver's own words about the GPU; a large
copy and a large bf16 matrix product by XLA, on random data.

What the answer means: `copy_bytes_per_s` and `bf16_flops_per_s` are what a memory-bound and an
arithmetic-bound kernel can reach here; the other figures say which versions the findings belong to.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.cublaslt import CublasLt
from benchmarks.gpu.driver import load_driver
from benchmarks.gpu.experiment import Experiment, run_experiment

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
    with run.part("cublaslt"):
        run.figure("cublaslt_version", CublasLt().version)
    with run.part("interface"):
        import jax

        header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
        found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
        run.figure("xla_ffi", f"{found['MAJOR']}.{found['MINOR']}")
    if not run.gpu:
        run.skip("ceilings", "no GPU")
        return
    with run.part("device"):
        for name, value in dataclasses.asdict(load_driver().facts()).items():
            run.figure(f"device.{name}", value)
    with run.part("jax"):
        import jax

        device = jax.devices()[0]
        run.check("jax finds the GPU", device.platform == "gpu", str(device))
        run.figure("memory_stats", device.memory_stats())
    with run.part("ceilings"):
        _ceilings(run)
    if run.has_time("target", 15):
        with run.part("target"):
            _target(run)


def _target(run: Experiment) -> None:
    """XLA's own description of this GPU, with which a machine without one can compile for it: see `ahead`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        program = "import jax; jax.jit(lambda x: x + 1)(jax.numpy.ones(8)).block_until_ready()"
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "XLA_FLAGS": flags}, check=True, timeout=60,
            capture_output=True,
        )  # fmt: skip
        found = sorted(Path(folder).glob("*gpu_target_config.pbtxt"))
        run.check("XLA describes this GPU", bool(found))
        run.figure("gpu_target_config", found[0].read_text() if found else None)


def _ceilings(run: Experiment) -> None:
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.timing import interleaved

    key = jax.random.key(0)
    bits = jax.random.bits(key, (COPY_ELEMENTS,), jnp.uint32)
    flip = jax.jit(lambda x: ~x)
    a, b = jax.random.normal(key, (2, PRODUCT, PRODUCT), jnp.bfloat16)
    times = interleaved({"copy": lambda: flip(bits), "product": lambda: jnp.dot(a, b)}, rounds=4)
    run.figure("copy_bytes_per_s", 8.0 * COPY_ELEMENTS / times["copy"].median, "B/s")
    run.figure("bf16_flops_per_s", 2.0 * PRODUCT**3 / times["product"].median, "FLOP/s")


if __name__ == "__main__":
    run_experiment("environment", __doc__, measure)
