"""How fast single CPU kernels are: products and fused kernels against the machine's limits and XLA:CPU.

One thread, pinned to one core.  Every round runs the limit, ours and XLA's one after the other, and the best
CPU time of all rounds counts, so a busy machine disturbs all alike.  glibc keeps its heap: XLA
allocates its results in every call, and fresh pages would be charged to its kernels.

All kernels are timed in several sweeps, and the best time of all sweeps counts.  For fused kernels, what
starts a call from Python takes as long as small kernels do, and is left out on both sides: ours is called
with everything prepared, and from XLA's time a program with the same arguments and one number as its
result is taken off.  Rounds are short (a millisecond) and many: another process that uses the same cache
disturbs a long one nearly always.

A kernel is compared with copies that move as many bytes, timed in the same way: the fastest that we know, our
own (`of_copy`), and the C library's (`of_memcpy`).  One core reads more slowly than it copies past the
caches, and many kernels read more than they write.  So the limit of the machine (`of_limit`) is to copy as
much as is written and to read the rest, by a loop that does nothing else.  The roofline is the longer of
that limit and of the arithmetic, which is the vector instructions that the cost model counts, at two per
cycle (one adds while one multiplies).  Where one instruction does more than one of the model's, such as
products of bf16 pairs, a kernel may beat it.  `memory` marks kernels whose limit is the longer of the two.

Fused kernels are measured in three sizes: `memory`, four times the last cache, where STREAM measures what a
machine copies; `model`, the shapes of GPT-2-small, where caches hold a part of the arrays, of the copy's too,
for a call that is not timed goes before those that are; and `turns`, the same shapes in so many sets of
arrays that caches have lost each by its next turn, as happens in a step of a model.  The summary says of each
size how near the kernels come to the copy in it.

Arrays of the size `memory` lie in huge pages, as what a program keeps does: in pages of 4 KB a copy takes 1.6
times as long, and of the memory that earlier kernels gave back a part, another one in each run, is in such.

    python benchmarks/kernel_speed.py [--rounds=9] [--only=gemm,fused] [--dtypes=f32,bf16]
                                      [--sizes=model,turns,memory] [--kernels=transpose,gather]

One line per kernel; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script
from benchmarks.cpu_limits import copy_bandwidth, fma_peak, measured_device, read_bandwidth
from benchmarks.fused_kernels import BEYOND_CACHE, FUSED, Traffic, fused_plan, jax_functions, traffic_of
from examples.workloads.direct import DirectKernel, DirectSequence, program_array, row_major
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import gemm_kernel
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.cost.kernel_work import plan_workload
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.llvm.cpu import host_target

KEEP_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}

# label, M, N, K, A transposed, B transposed, batch
PRODUCTS = [
    ("512^3", 512, 512, 512, False, False, 1),
    ("1024^3", 1024, 1024, 1024, False, False, 1),
    ("proj", 1024, 768, 768, False, False, 1),
    ("qkv", 1024, 2304, 768, False, False, 1),
    ("ffn2", 1024, 768, 3072, False, False, 1),
    ("ffn2 dX", 1024, 768, 3072, False, True, 1),
    ("ffn1 dW", 768, 3072, 1024, True, False, 1),
    ("ffn2 dW", 3072, 768, 1024, True, False, 1),
    ("long dW", 768, 768, 8192, True, False, 1),
    ("heads qk", 512, 512, 64, False, True, 8),
    ("heads pv", 512, 64, 512, False, False, 8),
    ("heads dV", 512, 64, 512, True, False, 8),
    ("small up", 256, 512, 128, False, False, 1),
    ("small down", 256, 128, 512, False, False, 1),
    ("small dW", 128, 512, 256, True, False, 1),
    ("128^3", 128, 128, 128, False, False, 1),
    ("router", 1024, 4, 768, False, False, 1),
]
SWEEPS = 5
LARGE = 512  # from so many rows, columns and terms on a product is measured against the peak


def best_of(runs: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, float]:
    """Best CPU seconds of each, interleaved; each measurement takes about `seconds`."""
    best, repeat = {}, {}
    for name, run in runs.items():
        run()
        start = time.process_time()
        run()
        best[name] = time.process_time() - start
        repeat[name] = max(1, int(seconds / max(best[name], 1e-7)))
    for _ in range(rounds):
        for name, run in runs.items():
            if repeat[name] > 1:  # the others' arrays have gone through the caches since
                run()
            start = time.process_time()
            for _ in range(repeat[name]):
                run()
            best[name] = min(best[name], (time.process_time() - start) / repeat[name])
    return best


def best_of_sweeps(
    cases: list[dict[str, Callable[[], object]]], rounds: int, seconds: float
) -> list[dict[str, float]]:
    """The best times of each case in several sweeps over all.

    A neighbour that uses the last cache or the memory does so for seconds, and spoils one sweep of a case.
    """
    best: list[dict[str, float]] = [{} for _ in cases]
    for _ in range(SWEEPS):
        for runs, known in zip(cases, best, strict=True):
            found = best_of(runs, rounds, seconds)
            known.update({k: min(v, known.get(k, v)) for k, v in found.items()})
    return best


@dataclasses.dataclass(frozen=True)
class ProductCase:
    """A product with everything prepared.

    Attributes:
        label: what it is called.
        dtype: of its arrays.
        large: whether it is measured against the peak.
        flops: that it takes.
        error: the largest difference between ours and XLA's, relative to the largest element.
        runs: the timed functions: the loop of multiply-adds that gives the peak, ours, and XLA's.
        peaks: what that loop has measured so far, in FLOP/s.
    """

    label: str
    dtype: str
    large: bool
    flops: float
    error: float
    runs: dict[str, Callable[[], object]]
    peaks: list[float]


def products(dtypes: list[str], rounds: int) -> list[dict]:
    """Every product: ours and XLA's GFLOP/s, and ours as a fraction of the measured peak."""
    found = []
    for dtype in dtypes:
        # products of bf16 are measured against the instruction for them, or f32 where there is none
        peak = fma_peak(host_target(), dtype, steps=100_000)
        cases = [product_case(*product, dtype, peak) for product in PRODUCTS]
        best = best_of_sweeps([case.runs for case in cases], rounds, 0.01)
        for case, known in zip(cases, best, strict=True):
            found.append(product_row(case, known))
            print_product(found[-1])
    return found


def product_case(
    label: str, m: int, n: int, k: int, ta: bool, tb: bool, batch: int, dtype: str, peak: Callable[[], float]
) -> ProductCase:
    """A product, its arrays filled and its result compared with XLA's."""
    import jax

    target, rng, kind = host_target(), np.random.default_rng(0), NUMPY_DTYPE[dtype]
    a, b = (
        aligned_empty((batch, *((k, m) if ta else (m, k))), kind),
        aligned_empty((batch, *((n, k) if tb else (k, n))), kind),
    )
    c = aligned_empty((batch, m, n), kind)
    a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
    gemm = row_major(m, n, k, dtype, transpose_a=ta, transpose_b=tb, batch=(batch,))
    kernel = DirectKernel(gemm_kernel("product", gemm, target), target)
    dims = (((1 if ta else 2,), (2 if tb else 1,)), ((0,), (0,)))
    x, y = jax.numpy.asarray(a), jax.numpy.asarray(b)
    xla = jax.jit(lambda x, y: jax.lax.dot_general(x, y, dims)).lower(x, y).compile()
    kernel(a, b, c)
    expected = np.asarray(xla(x, y), np.float32)
    error = float(np.abs(c.astype(np.float32) - expected).max() / np.abs(expected).max())
    peaks: list[float] = []
    addresses, units = [array.ctypes.data for array in (a, b, c)], (0, kernel.kernel.units)

    def own(_arrays: object = (a, b, c)) -> None:  # the arrays live as long as their addresses are used
        kernel.run(addresses, 0, units)

    runs = {
        "peak": lambda: peaks.append(peak()),
        "own": own,
        "xla": lambda: xla(x, y).block_until_ready(),
    }
    return ProductCase(label, dtype, min(m, n, k) >= LARGE, gemm.flops, error, runs, peaks)


def product_row(case: ProductCase, best: dict[str, float]) -> dict:
    """The report on a product, from the best time of each of its runs."""
    own, other = case.flops / best["own"], case.flops / best["xla"]
    return {
        "kernel": case.label,
        "dtype": case.dtype,
        "large": case.large,
        "gflops": round(own / 1e9, 1),
        "xla_gflops": round(other / 1e9, 1),
        "of_peak": round(own / max(case.peaks), 3),
        "ratio": round(own / other, 2),
        "error": float(f"{case.error:.0e}"),
    }


def print_product(row: dict) -> None:
    """One line for a product."""
    print(
        f"{row['kernel']:10s} {row['dtype']:5s} own {row['gflops']:6.1f} GFLOP/s "
        f"({row['of_peak']:.0%} of peak)  xla {row['xla_gflops']:6.1f}  "
        f"ratio {row['ratio']:.2f}  error {row['error']:.0e}",
        flush=True,
    )


# -- fused kernels -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FusedCase:
    """A fused kernel with everything prepared.

    Attributes:
        name: the kernel's.
        dtype: of its arrays.
        size: `model`, `turns` or `memory`.
        turns: calls in each run, on other arrays each.
        runs: timed: ours, two copies that move as many bytes, a loop that only reads as many, and
            XLA's for a model's shapes; beyond them most of its time goes to fresh pages.
        traffic: what it reads and writes.
        yardstick: bytes that the copies and the loop that reads move.
        arithmetic: seconds that the vector instructions take.
    """

    name: str
    dtype: str
    size: str
    turns: int
    runs: dict[str, Callable[[], object]]
    traffic: Traffic
    yardstick: int
    arithmetic: float


def fused(names: list[str], dtypes: list[str], sizes: list[str], rounds: int) -> list[dict]:
    """Every fused kernel, in every size: ours, XLA's, and our traffic as a fraction of copy bandwidth."""
    rows = []
    for size in sizes:
        cases = [fused_case(name, dtype, size) for name in names for dtype in dtypes]
        times = (2 if size == "model" else 1) * rounds
        best = best_of_sweeps([case.runs for case in cases], times, 0.001)
        for case, known in zip(cases, best, strict=True):
            rows.append(fused_row(case, known))
            print_fused(rows[-1])
        del cases, case  # before the next size's take memory
        yardsticks.cache_clear()
    return rows


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """One call, or all of them, one after the other; no result is freed before all are there."""

    def every() -> list[object]:
        return [call() for call in calls]

    return calls[0] if len(calls) == 1 else every


@functools.lru_cache(maxsize=8)  # kernels on large arrays share these arrays
def yardsticks(moved: int, turns: int, empty: Callable[..., np.ndarray]) -> dict[str, Callable[[], object]]:
    """What moves so many bytes and does nothing else, in as many sets of arrays, which `empty` makes."""
    target, sets = host_target(), range(turns)
    return {
        "copy": in_turn([copy_bandwidth(target, elements=moved // 8, empty=empty) for _ in sets]),
        "memcpy": in_turn([library_copy(moved // 2, empty) for _ in sets]),
        "read": in_turn([read_bandwidth(target, elements=moved // 4, empty=empty) for _ in sets]),
    }


def library_copy(size: int, empty: Callable[..., np.ndarray]) -> Callable[[], object]:
    """The C library's copy of so many bytes."""
    given, made = (empty((size,), np.uint8) for _ in range(2))
    given[...] = made[...] = 1
    addresses = ctypes.c_void_p(made.ctypes.data), ctypes.c_void_p(given.ctypes.data)

    def copy(_arrays: object = (given, made)) -> None:  # the arrays live as long as their addresses are used
        ctypes.memmove(*addresses, size)

    return copy


def finished(program: Callable, *given: object) -> object:
    """The result of a program of JAX's, once it is there."""
    import jax

    return jax.block_until_ready(program(*given))


def fused_case(name: str, dtype: str, size: str) -> FusedCase:
    """A fused kernel of one size, with its arrays."""
    import jax

    target, rng = host_target(), np.random.default_rng(0)
    device = measured_device(target, 1)
    plan, shape = fused_plan(name, dtype, size)
    kernel, traffic = DirectSequence(plan_kernels(plan, target), target), traffic_of(plan)
    turns = -(-BEYOND_CACHE * target.l3_bytes // traffic.total) if size == "turns" else 1
    empty = program_array if size == "memory" else aligned_empty
    sets = []
    for _ in range(turns):
        arrays = [empty((o.size,), NUMPY_DTYPE[o.dtype]) for o in plan.operands]
        for array in arrays:
            array[...] = np.abs(rng.standard_normal(array.shape, np.float32))
            if array.dtype == np.int32:
                array[...] = rng.permutation(array.size)
        sets.append(arrays)
    yardstick = BEYOND_CACHE * target.l3_bytes if size == "memory" else traffic.total
    runs = {
        **yardsticks(yardstick, turns, empty),
        "own": in_turn([kernel.prepare(*arrays) for arrays in sets]),
    }
    if size != "memory":
        read = [k for k in range(len(plan.operands)) if name == "adam" or k not in plan.results]
        forms = [shape if plan.operands[k].size == math.prod(shape) else (-1,) for k in read]
        pairs = list(zip(read, forms, strict=True))
        given = [[jax.numpy.asarray(arrays[k].reshape(form)) for k, form in pairs] for arrays in sets]
        xla = jax.jit(jax_functions()[name]).lower(*given[0]).compile()
        nothing = jax.jit(lambda *_: jax.numpy.zeros(())).lower(*given[0]).compile()
        for label, program in (("xla", xla), ("start", nothing)):
            calls = [functools.partial(finished, program, *each) for each in given]
            runs[label] = in_turn(calls)
    arithmetic = plan_workload(plan).vector_bytes / device.vector_bytes / (2 * device.vector_rate)
    return FusedCase(name, dtype, size, turns, runs, traffic, yardstick, arithmetic)


def fused_row(case: FusedCase, best: dict[str, float]) -> dict:
    """The report on a fused kernel, from the best time of each of its runs."""
    best = {name: seconds / case.turns for name, seconds in best.items()}
    best |= {name: best[name] * case.traffic.total / case.yardstick for name in ("copy", "memcpy", "read")}
    limit, moved = case.traffic.limit(best["copy"], best["read"]), case.traffic.total / 1e9
    row = {
        "kernel": case.name,
        "dtype": case.dtype,
        "size": case.size,
        "microseconds": round(best["own"] * 1e6, 1),
        "gigabytes_per_second": round(moved / best["own"], 1),
        "copy_gigabytes_per_second": round(moved / best["copy"], 1),
        "memcpy_gigabytes_per_second": round(moved / best["memcpy"], 1),
        "read_gigabytes_per_second": round(moved / best["read"], 1),
        "arithmetic_microseconds": round(case.arithmetic * 1e6, 1),
        "memory_bound": limit >= case.arithmetic,
        "of_copy": round(best["copy"] / best["own"], 3),
        "of_memcpy": round(best["memcpy"] / best["own"], 3),
        "of_limit": round(limit / best["own"], 3),
        "of_roofline": round(max(limit, case.arithmetic) / best["own"], 3),
    }
    if "xla" in best:
        other = max(best["xla"] - best["start"], best["xla"] / 2)
        row |= {"xla_microseconds": round(other * 1e6, 1), "ratio": round(other / best["own"], 2)}
    return row


def fused_summary(rows: list[dict]) -> dict:
    """How near the kernels of one size that memory binds come to its copies, and to the machine's limit."""
    bound = [r for r in rows if r["memory_bound"]]
    fastest = [f"{what}_gigabytes_per_second" for what in ("copy", "memcpy", "read")]
    nearest = ["of_copy", "of_memcpy", "of_limit"]
    return {name: max((r[name] for r in rows), default=0.0) for name in fastest} | {
        f"{name}_worst": min((r[name] for r in bound), default=0.0) for name in nearest
    }


def print_fused(row: dict) -> None:
    """One line for a fused kernel."""
    bound = "memory" if row["memory_bound"] else "arithmetic"
    against = f"  xla {row['xla_microseconds']:7.0f} us  ratio {row['ratio']:.2f}" if "ratio" in row else ""
    print(
        f"{row['kernel']:13s} {row['dtype']:5s} {row['size']:6s} own {row['microseconds']:7.0f} us "
        f"{row['gigabytes_per_second']:5.1f} GB/s ({row['of_copy']:.0%} of copy, {row['of_memcpy']:.0%} "
        f"of memcpy, {row['of_limit']:.0%} of limit, {row['of_roofline']:.0%} of roofline: {bound}){against}",
        flush=True,
    )


def geometric_mean(values: list[float]) -> float:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 3) if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="gemm,fused")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--sizes", default="model,memory")
    parser.add_argument("--kernels", default="", help="fused kernels to run, all unless given")
    options = parser.parse_args()
    if any(name not in os.environ for name in KEEP_HEAP):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_HEAP})
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    names = options.kernels.split(",") if options.kernels else list(FUSED)
    dtypes, wanted, sizes = (text.split(",") for text in (options.dtypes, options.only, options.sizes))
    load_before = os.getloadavg()[0]
    gemms = products(dtypes, options.rounds) if "gemm" in wanted else []
    kernels = fused(names, dtypes, sizes, options.rounds) if "fused" in wanted else []
    compared = [r for r in gemms + kernels if "ratio" in r]
    summary = {
        "cpu": host_target().cpu,
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "gemm": gemms,
        "fused": kernels,
        "fused_by_size": {size: fused_summary([r for r in kernels if r["size"] == size]) for size in sizes},
        "fused_of_roofline_worst": min([r["of_roofline"] for r in kernels], default=0.0),
        "worst_ratio": min([r["ratio"] for r in compared], default=0.0),
    }
    for dtype in dtypes:
        large = [r["of_peak"] for r in gemms if r["large"] and r["dtype"] == dtype]
        summary[f"gemm_of_peak_{dtype}_worst_large"] = min(large, default=0.0)
        summary[f"gemm_ratio_{dtype}"] = geometric_mean([r["ratio"] for r in gemms if r["dtype"] == dtype])
        summary[f"fused_ratio_{dtype}"] = geometric_mean(
            [r["ratio"] for r in compared if "microseconds" in r and r["dtype"] == dtype]
        )
    print(json.dumps(summary))


if __name__ == "__main__":
    script.run(main)
