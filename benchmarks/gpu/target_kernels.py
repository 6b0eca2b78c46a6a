"""What share of the device's speed does each kernel and each product of our target reach?

Method: the launches of GPT-2's block, head and Adam, each by itself: the same launch many times between two
events.  Memory holds random numbers that are normal in bf16 and in f32: products of zeros are 13 % faster.
Bytes are of the distinct arrays that a launch reads and writes.  The ceiling of bytes is XLA's copy of
1 GiB.

What the answer means: `share` of a kernel that moves much more than the L2 cache holds should be above 0.85;
a smaller one may be above 1.  The largest that are far below come first; their texts are beside them.  The
library's products are half of a step's FLOPs: those far below the rate of the largest have a pitch or a tile
that does not fit.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.device_runs import ProgramRuns, device_runs
from benchmarks.gpu.driver import kernel_facts
from benchmarks.gpu.experiment import Experiment, run_experiment
from mpmd.compile.backends.native_gpu.launches import KernelLaunch, ProductLaunch
from mpmd.compile.backends.native_gpu.machine.launch_report import launch_work
from mpmd.compile.backends.native_gpu.target import GpuCode

SIZE = {"batch": 8, "tokens": 1024, "width": 768, "heads": 12, "vocabulary": 50257}
SMALL = {"batch": 1, "tokens": 8, "width": 16, "heads": 2, "vocabulary": 32}
NAMES = ("block forward+backward", "head forward+backward", "adam")
MAX_NAMED, GOOD = 10, 0.85
COPIED = 1 << 28  # words


def measure(run: Experiment) -> None:
    """Finds it out."""
    ceiling = _copy_bytes_per_s(run) if run.gpu else 1e9
    run.figure("copy_bytes_per_s", ceiling, "B/s")
    from examples.workloads.fragments import cases

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

    code, label = compiled(run, fragment_of(name, function, arguments)).artefact.code, name.replace(" ", "_")
    assert isinstance(code, GpuCode)
    with device_runs(gpu_of(run)) as runs:
        memory = [runs.memory(a.size) for a in code.program.allocations]
        run.figure(f"products.{label}", _products(run, runs, code, memory))
        rows, facts = [], []
        for step in _distinct(code).values():
            us, work = _microseconds(run, runs, code, step, memory), launch_work(step, code.program)
            facts.append(kernel_facts(runs.driver, runs.kernel(code.cubins[step.kernel])))
            share = round(work.bytes / us * 1e6 / ceiling, 3)
            rows.append(
                {"kernel": step.kernel, "of": step.name, "us": us, "bytes": work.bytes, "share": share}
            )
    rows.sort(key=lambda row: (row["bytes"], row["us"]), reverse=True)
    run.figure(f"kernels.{label}", rows)
    good = sum(row["share"] >= GOOD for row in rows[:MAX_NAMED])
    run.figure(f"{label}.good_of_the_largest", f"{good} of {len(rows[:MAX_NAMED])}")
    run.figure(f"{label}.spilling_kernels", sum(fact["spilled_bytes"] > 0 for fact in facts))
    run.figure(f"{label}.max_registers", max((fact["registers"] for fact in facts), default=0))
    worst = {row["kernel"]: code.program.kernels[row["kernel"]].source for row in rows[:3]}
    run.figure(f"{label}.texts_of_the_largest", worst)
    run.check(f"{name}: all kernels run by themselves", bool(rows), f"{len(rows)} kernels")


def _distinct(code: GpuCode) -> dict[Any, KernelLaunch]:
    found: dict[Any, KernelLaunch] = {}
    for step in code.program.launches():
        if isinstance(step, KernelLaunch):
            found.setdefault((step.kernel, step.grid, tuple(s.size for s in step.arguments)), step)
    return found


def _products(run: Experiment, runs: ProgramRuns, code: GpuCode, memory: list[int]) -> list[dict[str, Any]]:
    """The library's products, those with the most FLOPs first."""
    steps = {s.descriptor: s for s in code.program.launches() if isinstance(s, ProductLaunch)}
    found = [
        (launch_work(step, code.program).flops, _microseconds(run, runs, code, step, memory), str(descriptor))
        for descriptor, step in steps.items()
    ]
    return [
        {"product": text, "us": us, "tflops_per_s": round(flops / us / 1e6, 1)}
        for flops, us, text in sorted(found, reverse=True)
    ]


def _microseconds(
    run: Experiment, runs: ProgramRuns, code: GpuCode, step: KernelLaunch | ProductLaunch, memory: list[int]
) -> float:
    return round(runs.microseconds(runs.step(code, step, memory), 0.02 if run.gpu else 0.0), 2)


if __name__ == "__main__":
    run_experiment("target_kernels", __doc__, measure)
