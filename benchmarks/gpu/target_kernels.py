"""What share of the memory's speed does each kernel of our target reach?

Method: the launches of GPT-2's block, head and Adam, each by itself: the same launch many times on zeros, its
time the wall time of all over their number.  Bytes are those of the distinct slices that it reads and writes.
The ceiling is a copy of 1 GiB by XLA.

What the answer means: `share` of a kernel that moves much more than the L2 cache holds should be above 0.85;
a smaller one may be above 1.  The largest that are far below come first; their texts are beside them.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

from benchmarks.gpu.driver import kernel_facts
from benchmarks.gpu.experiment import Experiment, run_experiment

SIZE = {"batch": 8, "tokens": 1024, "width": 768, "heads": 12, "vocabulary": 50257}
SMALL = {"batch": 1, "tokens": 8, "width": 16, "heads": 2, "vocabulary": 32}
NAMES = ("block forward+backward", "head forward+backward", "adam")
MAX_NAMED, GOOD = 10, 0.85
COPIED = 1 << 28  # words
ZERO_BYTES = 4


def measure(run: Experiment) -> None:
    """Finds it out."""
    ceiling = _copy_bytes_per_s(run) if run.gpu else 1e9
    run.figure("copy_bytes_per_s", ceiling, "B/s")
    from benchmarks.fragments import cases

    for name, function, arguments in cases(SIZE if run.gpu else SMALL, "bf16"):
        if name in (NAMES if run.gpu else NAMES[2:]) and run.has_time(name, 15):
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
    from mpmd.compile.backends.native_gpu.launches import KernelLaunch

    code: Any = compiled(run, fragment_of(name, function, arguments)).made.code
    gpu, label = gpu_of(run), name.replace(" ", "_")
    launches: dict[Any, KernelLaunch] = {}
    for step in code.program.launches():
        if isinstance(step, KernelLaunch):
            launches.setdefault((step.kernel, step.grid, tuple(s.size for s in step.arguments)), step)
    found, facts = [], []
    with contextlib.ExitStack() as undo:
        gpu.driver.enter()
        memory = [_zeros(gpu.driver, a.size, undo) for a in code.program.allocations]
        for step in launches.values():
            cubin = code.cubins[step.kernel]
            at = [memory[s.allocation] + s.offset for s in step.arguments]
            kernel = gpu.driver.kernel(cubin, undo)
            facts.append(kernel_facts(gpu.driver, kernel))
            seconds = _seconds(run, gpu.driver, kernel, cubin, step.grid, at)
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


def _zeros(driver: Any, size: int, undo: contextlib.ExitStack) -> int:
    """The address of so many zero bytes."""
    whole, found = -(-max(size, 1) // 256) * 256, ctypes.c_uint64()
    driver.call("cuMemAlloc_v2", ctypes.byref(found), whole, what="memory of an experiment")
    undo.callback(driver.function("cuMemFree_v2"), found.value)
    driver.call(
        "cuMemsetD32Async", found.value, 0, whole // ZERO_BYTES, None, what="clearing memory of an experiment"
    )
    driver.call("cuStreamSynchronize", None, what="clearing memory of an experiment")
    return found.value


def _seconds(run: Experiment, driver: Any, kernel: int, cubin: Any, grid: int, addresses: list[int]) -> float:
    """Of one launch."""
    values = (ctypes.c_uint64 * (len(addresses) + 2))(*addresses, 0, 0)
    pointers = (ctypes.c_void_p * len(values))(
        *(ctypes.addressof(values) + 8 * k for k in range(len(values)))
    )
    launch = driver.function("cuLaunchKernel")

    def start(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            status = launch(kernel, grid, 1, 1, cubin.threads, 1, 1, cubin.shared_bytes, None, pointers, None)
            if status:
                raise RuntimeError(f"{cubin.name} is not launched: {driver.words(status)}")
        driver.call("cuStreamSynchronize", None, what=f"running {cubin.name}")
        return (time.perf_counter() - begin) / times

    if not run.gpu:
        return start(1)
    once = max(start(3), 1e-6)
    return min(start(max(5, min(200, round(0.02 / once)))) for _ in range(3))


if __name__ == "__main__":
    run_experiment("target_kernels", __doc__, measure)
