"""What share of the device's speed does each kernel and each product of our target reach?

Method: the launches of GPT-2's block, head and Adam, each by itself: the same launch many times, its time the
wall time of all over their number.  Memory holds random numbers that are normal in bf16 and in f32: products
of zeros are 13 % faster.  Bytes are those of the distinct slices that a launch reads and writes.  The ceiling
of bytes is a copy of 1 GiB by XLA.

What the answer means: `share` of a kernel that moves much more than the L2 cache holds should be above 0.85;
a smaller one may be above 1.  The largest that are far below come first; their texts are beside them.  The
library's products are half of a step's FLOPs: those far below the rate of the largest have a pitch or a tile
that does not fit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.driver import kernel_facts
from benchmarks.gpu.experiment import Experiment, run_experiment
from mpmd.compile.backends.native_gpu.driver import GpuDriver
from mpmd.compile.backends.native_gpu.gpu import OpenGpu
from mpmd.compile.backends.native_gpu.launches import KernelLaunch, LaunchProgram, ProductLaunch
from mpmd.compile.backends.native_gpu.loading import PARAMETER_ALIGNMENT
from mpmd.compile.backends.native_gpu.triton.cubin import Cubin

SIZE = {"batch": 8, "tokens": 1024, "width": 768, "heads": 12, "vocabulary": 50257}
SMALL = {"batch": 1, "tokens": 8, "width": 16, "heads": 2, "vocabulary": 32}
NAMES = ("block forward+backward", "head forward+backward", "adam")
MAX_NAMED, GOOD = 10, 0.85
COPIED = 1 << 28  # words
RANDOM = 8 << 20  # numbers that repeat


def measure(run: Experiment) -> None:
    """Finds it out."""
    ceiling = _copy_bytes_per_s(run) if run.gpu else 1e9
    run.figure("copy_bytes_per_s", ceiling, "B/s")
    from benchmarks.fragments import cases

    for name, function, arguments in cases(SIZE if run.gpu else SMALL, "bf16"):
        if name in NAMES and run.has_time(name, 15):
            with run.part(name):
                _kernels(run, name, function, arguments, ceiling)


def _copy_bytes_per_s(run: Experiment) -> float:
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.timing import interleaved

    words, flip = jnp.zeros(COPIED, jnp.uint32), jax.jit(lambda x: ~x)
    return 8.0 * COPIED / interleaved({"": lambda: flip(words)}, rounds=4)[""].median


def _kernels(run: Experiment, name: str, function: Any, arguments: list[Any], ceiling: float) -> None:
    from benchmarks.gpu.target import compiled, fragment_of, gpu_of

    code: Any = compiled(run, fragment_of(name, function, arguments)).made.code
    gpu, label = gpu_of(run), name.replace(" ", "_")
    launches: dict[Any, KernelLaunch] = {}
    for step in code.program.launches():
        if isinstance(step, KernelLaunch):
            launches.setdefault((step.kernel, step.grid, tuple(s.size for s in step.arguments)), step)
    found, facts = [], []
    with contextlib.ExitStack() as undo:
        gpu.driver.enter()
        memory = [_random(gpu.driver, a.size, undo) for a in code.program.allocations]
        run.figure(f"products.{label}", _products(run, gpu, code.program, memory, undo))
        for step in launches.values():
            cubin = code.cubins[step.kernel]
            at = [memory[s.allocation] + s.offset for s in step.arguments]
            kernel = gpu.driver.kernel(cubin, undo)
            facts.append(kernel_facts(gpu.driver, kernel))
            seconds = _seconds(run, gpu.driver, _launch(gpu.driver, kernel, cubin, step.grid, at))
            moved = sum({(s.allocation, s.offset): s.size for s in step.arguments}.values())
            found.append((moved, seconds, step))
    found.sort(key=lambda row: row[:2], reverse=True)
    rows = [
        {
            "kernel": step.kernel, "of": step.name, "us": round(1e6 * seconds, 2), "bytes": moved,
            "share": round(moved / seconds / ceiling, 3),
        }
        for moved, seconds, step in found
    ]  # fmt: skip
    run.figure(f"kernels.{label}", rows)
    good = sum(row["share"] >= GOOD for row in rows[:MAX_NAMED])
    run.figure(f"{label}.good_of_the_largest", f"{good} of {len(rows[:MAX_NAMED])}")
    run.figure(f"{label}.spilling_kernels", sum(fact["spilled_bytes"] > 0 for fact in facts))
    run.figure(f"{label}.max_registers", max((fact["registers"] for fact in facts), default=0))
    worst = {step.kernel: code.program.kernels[step.kernel].source for _, _, step in found[:3]}
    run.figure(f"{label}.texts_of_the_largest", worst)
    run.check(f"{name}: all kernels run by themselves", bool(rows), f"{len(rows)} kernels")


def _products(
    run: Experiment, gpu: OpenGpu, program: LaunchProgram, memory: list[int], undo: contextlib.ExitStack
) -> list[dict[str, Any]]:
    """The library's products, those with the most FLOPs first."""
    found: list[tuple[int, float, str]] = []
    steps = {s.descriptor: s for s in program.launches() if isinstance(s, ProductLaunch)}
    for descriptor, step in steps.items():
        made = gpu.cublaslt.prepare(descriptor, PARAMETER_ALIGNMENT, undo)
        words, size = made.words, made.workspace_bytes
        work = _random(gpu.driver, size, undo)
        a, b, d = (memory[s.allocation] + s.offset for s in (step.a, step.b, step.d))
        first, second = (a, b) if descriptor.d.transposed else (b, a)
        factors = [words["alpha"], first, words["a"], second, words["b"]]
        given = [words["handle"], words["descriptor"], *factors, words["beta"], d, words["c"], d, words["d"]]
        given += [words["algorithm"], work, size, None]
        if step.shift is not None:
            gpu.cublaslt.shift(made, memory[step.shift.allocation] + step.shift.offset)
        multiply = functools.partial(
            gpu.cublaslt.call, "cublasLtMatmul", *given, what=f"running {descriptor}"
        )
        flops = 2 * descriptor.batch * descriptor.m * descriptor.n * descriptor.k
        found.append((flops, _seconds(run, gpu.driver, multiply), str(descriptor)))
    found.sort(reverse=True)
    return [
        {"product": text, "us": round(1e6 * seconds, 2), "tflops_per_s": round(flops / seconds / 1e12, 1)}
        for flops, seconds, text in found
    ]


def _random(driver: GpuDriver, size: int, undo: contextlib.ExitStack) -> int:
    """The address of random numbers: each word is a float, and so is each of its halves."""
    found, what = ctypes.c_uint64(), "memory of an experiment"
    driver.call("cuMemAlloc_v2", ctypes.byref(found), max(size, 1), what=what)
    undo.callback(driver.function("cuMemFree_v2"), found.value)
    data = _numbers()
    for at in range(0, size, len(data)):
        part = min(len(data), size - at)
        driver.call("cuMemcpyHtoD_v2", found.value + at, data[:part], part, what=what)
    driver.call("cuStreamSynchronize", None, what=what)
    return found.value


@functools.cache
def _numbers() -> bytes:
    import ml_dtypes

    return np.random.default_rng(0).standard_normal(RANDOM).astype(ml_dtypes.bfloat16).tobytes()


def _launch(
    driver: GpuDriver, kernel: int, cubin: Cubin, grid: int, addresses: list[int]
) -> Callable[[], None]:
    values = (ctypes.c_uint64 * (len(addresses) + 2))(*addresses, 0, 0)
    pointers = (ctypes.c_void_p * len(values))(
        *(ctypes.addressof(values) + 8 * k for k in range(len(values)))
    )
    shape = (grid, 1, 1, cubin.threads, 1, 1, cubin.shared_bytes, None)

    def launch() -> None:
        assert values  # the pointers are to them
        driver.call("cuLaunchKernel", kernel, *shape, pointers, None, what=f"running {cubin.name}")

    return launch


def _seconds(run: Experiment, driver: GpuDriver, begin: Callable[[], None]) -> float:
    """Of one launch."""

    def start(times: int) -> float:
        before = time.perf_counter()
        for _ in range(times):
            begin()
        driver.call("cuStreamSynchronize", None, what="running launches")
        return (time.perf_counter() - before) / times

    if not run.gpu:
        return start(1)
    once = max(start(3), 1e-6)
    return min(start(max(5, min(200, round(0.02 / once)))) for _ in range(3))


if __name__ == "__main__":
    run_experiment("target_kernels", __doc__, measure)
