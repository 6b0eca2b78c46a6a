"""Where does the time of GPT-2 124M's step go, launch by launch?

Method: all launches of the prepared step in their order on one stream, without XLA, the parameters and tokens
from a training run, all other memory random; an event between any two, 20 times.  Then without events:
issued one by one, and captured as one graph.

What the answer means: `launch.…` has microseconds of one (median) and of all that are equal, an event's own
included, about one each.  `sum_us` against `one_by_one.done_us` shows gaps; `one_by_one.issued_us` is
the host's time, and where it is the larger part of `done_us`, `graph` is faster.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from typing import Any

from benchmarks.gpu.device_runs import Issue, ProgramRuns, device_runs, on_host
from benchmarks.gpu.driver import kernel_facts
from benchmarks.gpu.experiment import Experiment, run_experiment
from benchmarks.gpu.pack import TravellingPack
from benchmarks.gpu.programs import SMALL, ModelSize, step_arguments
from benchmarks.gpu.target import clocks, gpu_of
from mpmd.compile.backends.native_gpu.launches import KernelLaunch, ProductLaunch, SimpleStep
from mpmd.compile.backends.native_gpu.machine.launch_report import launch_work
from mpmd.compile.backends.native_gpu.target import GpuCode, GpuTarget

REPEATS = 20


def measure(run: Experiment) -> None:
    """Finds it out."""
    size = ModelSize() if run.gpu else SMALL
    _, made = TravellingPack(run.pack).program("step", GpuTarget())
    code = made.code
    assert isinstance(code, GpuCode)
    with device_runs(gpu_of(run)) as runs:
        memory = _memory(runs, code, size)
        steps = list(code.program.launches())
        issues = [runs.step(code, step, memory) for step in steps]
        run.figure("clocks_before", clocks())
        repeats = REPEATS if run.gpu else 1
        with run.part("launches"):
            _launches(run, runs, code, steps, issues, repeats)
        with run.part("one by one"):
            on_host(runs, issues, 1)
            run.figure("one_by_one", on_host(runs, issues, repeats), "us")
        with run.part("graph"):
            graph = runs.captured(issues)
            on_host(runs, [graph], 1)
            run.figure("graph", on_host(runs, [graph], repeats), "us")
        run.figure("clocks_after", clocks())


def _memory(runs: ProgramRuns, code: GpuCode, size: ModelSize) -> list[int]:
    """The allocations: parameters and constants hold theirs."""
    given, found = step_arguments(size), []
    for number, allocation in enumerate(code.program.allocations):
        data = None
        if allocation.kind == "parameter":
            data = given[number].tobytes()
        elif allocation.kind == "constant":
            data = code.program.constants
        found.append(runs.memory(allocation.size, data))
    return found


def _launches(
    run: Experiment,
    runs: ProgramRuns,
    code: GpuCode,
    steps: list[SimpleStep],
    issues: list[Issue],
    repeats: int,
) -> None:
    runs.between(issues)
    times = [statistics.median(column) for column in zip(*(runs.between(issues) for _ in range(repeats)))]
    run.figure("sequence_us", [round(us, 2) for us in times])
    run.figure("sum_us", sum(times), "us")
    equal: dict[Any, list[int]] = collections.defaultdict(list)
    for number, step in enumerate(steps):
        work = launch_work(step, code.program)
        if isinstance(step, KernelLaunch):
            equal[step.kernel, step.grid, work.bytes].append(number)
        else:
            what = step.descriptor if isinstance(step, ProductLaunch) else work.kind
            equal[str(what), 0, work.bytes].append(number)
    for (what, grid, _), numbers in sorted(equal.items(), key=lambda e: -sum(times[n] for n in e[1])):
        work = launch_work(steps[numbers[0]], code.program)
        us = statistics.median(times[n] for n in numbers)
        row = {
            **dataclasses.asdict(work), "what": what, "grid": grid, "count": len(numbers), "us": round(us, 2),
            "all_us": round(sum(times[n] for n in numbers), 2), "bytes_per_s": work.bytes / us * 1e6,
            "flops_per_s": work.flops / us * 1e6,
        }  # fmt: skip
        if what in code.cubins:
            row |= kernel_facts(runs.driver, runs.kernel(code.cubins[what]))
        run.figure(f"launch.{numbers[0]:03}", row)


if __name__ == "__main__":
    run_experiment("step_launches", __doc__, measure)
