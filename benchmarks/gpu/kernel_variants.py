"""Which tiles, blocks, warps and stages are the fastest for the kernels of GPT-2's step?

Method: prepared kernels that compute the same in several ways, each many times between events, on random
numbers; integers are zero.  The first kernel again every 20 variants, so that a change of clocks is seen.

What the answer means: `variant.….own` is the target's choice; the fastest of a group is what a table of
measured tiles would hold.  `spilled_bytes` above 0 says that a tile does not fit into registers.
"""

from __future__ import annotations

from benchmarks.gpu.device_runs import DeviceRuns, Issue, device_runs
from benchmarks.gpu.driver import kernel_facts
from benchmarks.gpu.experiment import Experiment, run_experiment
from benchmarks.gpu.pack import OWN, KernelVariant, TravellingPack
from benchmarks.gpu.target import clocks, gpu_of
from mpmd.errors import CompileError

EVERY = 20
_ALIGNED = 256
_PITCH = 4
"""An argument may be a part of each row of an array that is so many times as large."""


def measure(run: Experiment) -> None:
    """Finds it out."""
    everything = [v for some in TravellingPack(run.pack).variants() for v in some]
    if not everything:
        run.skip("variants", "none were prepared")
        return
    run.figure("clocks_before", clocks())
    with device_runs(gpu_of(run)) as runs:
        pool = _Arguments(runs, everything)
        rest = everything[run.after :]
        baseline = pool.issue(next((v for v in rest if v.choice == OWN), everything[0]))
        for number, variant in enumerate(rest, run.after):
            if run.seconds_left() < 1:
                run.skip("the other variants", f"{len(everything) - number} of {len(everything)}: no time")
                break
            if number % EVERY == 0:
                with run.part("baseline"):
                    run.figure(f"baseline.{number:05}", _microseconds(run, runs, baseline), "us")
            name = f"variant.{variant.group}.{variant.choice}"
            with run.part(name):
                _measure(run, runs, pool, variant, name)
            if not _works(runs):
                run.restart(number + 1)
    run.figure("clocks_after", clocks())


def _measure(run: Experiment, runs: DeviceRuns, pool: _Arguments, variant: KernelVariant, name: str) -> None:
    us = _microseconds(run, runs, pool.issue(variant))
    facts = kernel_facts(runs.driver, runs.kernel(variant.cubin))
    row = {
        "us": round(us, 2), "grid": variant.grid, "threads": variant.cubin.threads,
        "shared_bytes": variant.cubin.shared_bytes, **facts,
        "bytes_per_s": variant.moved / us * 1e6, "flops_per_s": variant.flops / us * 1e6,
    }  # fmt: skip
    run.figure(name, row)


def _microseconds(run: Experiment, runs: DeviceRuns, issue: Issue) -> float:
    return runs.microseconds(issue, 0.005 if run.gpu else 0.0)


def _works(runs: DeviceRuns) -> bool:
    """Whether the GPU's context still runs anything."""
    try:
        runs.wait()
    except CompileError:
        return False
    return True


def _room(size: int) -> int:
    return -(-_PITCH * size // _ALIGNED) * _ALIGNED


class _Arguments:
    """Memory for the arguments of all variants: numbers, and zeros where they are integers."""

    def __init__(self, runs: DeviceRuns, variants: list[KernelVariant]) -> None:
        self._runs = runs
        needed = max(sum(map(_room, v.sizes)) for v in variants)
        self._numbers, self._zeros = runs.memory(needed), runs.zeros(needed)

    def issue(self, variant: KernelVariant) -> Issue:
        """A launch of a variant; its arguments follow each other."""
        places, offset = [], 0
        for size, pointer in zip(variant.sizes, variant.pointers):
            floating = pointer.startswith(("*fp", "*bf"))
            places.append((self._numbers if floating else self._zeros) + offset)
            offset += _room(size)
        return self._runs.launch(variant.cubin, variant.grid, places)


if __name__ == "__main__":
    run_experiment("kernel_variants", __doc__, measure)
