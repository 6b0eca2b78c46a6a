"""Which tiles, blocks, warps and stages are the fastest for the kernels of GPT-2's step?

Method: prepared kernels that compute the same in several ways, each many times between events, on random
numbers; integers are zero.  The first kernel again every 20 variants, so that a change of clocks is seen.

What the answer means: `variant.….own` is the target's choice.  `tiles` has the fastest of each kernel as
lines of a table of measured tiles, as `mpmd-gpu-tune` makes it.  `spilled_bytes` above 0 says that a tile
does not fit into registers.
"""

from __future__ import annotations

import collections

from benchmarks.gpu.device_runs import ProgramRuns, device_runs
from benchmarks.gpu.driver import kernel_facts
from benchmarks.gpu.experiment import Experiment, run_experiment
from benchmarks.gpu.pack import TravellingPack
from benchmarks.gpu.target import clocks, gpu_of
from mpmd.compile.backends.native_gpu.triton.choices import OWN, MeasuredTiles
from mpmd.compile.backends.native_gpu.tuning.tile_candidates import CompiledWay
from mpmd.compile.backends.native_gpu.tuning.tune import Issue, RandomArguments, fastest

EVERY = 20


def measure(run: Experiment) -> None:
    """Finds it out."""
    everything = [v for some in TravellingPack(run.pack).variants() for v in some]
    if not everything:
        run.skip("variants", "none were prepared")
        return
    run.figure("clocks_before", clocks())
    times = collections.defaultdict[str, dict[str, float]](dict)
    with device_runs(gpu_of(run)) as runs:
        arguments = RandomArguments(runs, everything)
        rest = everything[run.after :]
        baseline = arguments.issue(next((v for v in rest if v.choice == OWN), everything[0]))
        for number, variant in enumerate(rest, run.after):
            if run.seconds_left() < 1:
                run.skip("the other variants", f"{len(everything) - number} of {len(everything)}: no time")
                break
            if number % EVERY == 0:
                with run.part("baseline"):
                    run.figure(f"baseline.{number:05}", _microseconds(run, runs, baseline), "us")
            name = f"variant.{variant.key}.{variant.choice}"
            with run.part(name):
                us = _microseconds(run, runs, arguments.issue(variant))
                times[variant.key][variant.choice] = us
                run.figure(name, _row(runs, variant, us))
            if not runs.works():
                run.restart(number + 1)
    table = MeasuredTiles.of((key, fastest(found)) for key, found in times.items() if OWN in found)
    run.figure("tiles", table.text())
    run.figure("clocks_after", clocks())


def _row(runs: ProgramRuns, variant: CompiledWay, us: float) -> dict[str, object]:
    """Of two kernels, the grid and the facts of the first."""
    first = variant.launches[0]
    return {
        "of": variant.name, "us": round(us, 2), "grid": first.grid, "threads": first.cubin.threads,
        "shared_bytes": first.cubin.shared_bytes, **kernel_facts(runs.driver, runs.kernel(first.cubin)),
        "bytes_per_s": variant.moved / us * 1e6, "flops_per_s": variant.flops / us * 1e6,
    }  # fmt: skip


def _microseconds(run: Experiment, runs: ProgramRuns, issue: Issue) -> float:
    return runs.microseconds(issue, 0.005 if run.gpu else 0.0)


if __name__ == "__main__":
    run_experiment("kernel_variants", __doc__, measure)
