"""How long is a pipelined train step, against `jax.jit` on one device and data parallel on all?

    python benchmarks/train_step.py [--rounds 5] [--steps 2] [--schedule 1f1b] [--stages 4]

The variants run interleaved in one process.  For each: wall seconds and CPU seconds per step, median over
the rounds.  The last line is one JSON object: `wall_ratio` and `cpu_ratio` are the pipelined step over
`jax.jit` with `scan` accumulation on one device, `wall_ratio_spmd` over data parallel on all devices,
`overhead_us` is the time per instruction of a step of the same sizes whose fragments are too small to
matter, and `boundary_bytes` what the meshes hold for values that cross between them, at the predicted peak,
for 4, 8 and 16 microbatches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Variant:
    """A way to run the step: keeps its state between rounds."""

    def __init__(self, name: str, step: Any, state: Any, batch: Any) -> None:
        self.name, self.step, self.state, self.batch = name, step, state, batch
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.loss = 0.0
        start = time.perf_counter()
        self.run(1)
        self.first_call_s = time.perf_counter() - start

    def run(self, steps: int) -> None:
        """Takes steps and waits for the last one."""
        for _ in range(steps):
            *self.state, loss = self.step(*self.state, *self.batch)
        jax.block_until_ready((self.state, loss))
        self.loss = float(loss)

    def measure(self, steps: int) -> None:
        """One round."""
        wall, cpu = time.perf_counter(), cpu_seconds()
        self.run(steps)
        self.wall.append((time.perf_counter() - wall) / steps)
        self.cpu.append((cpu_seconds() - cpu) / steps)


def variants(args: argparse.Namespace) -> list[Variant]:
    """The variants, compiled and run once."""
    import mpmd
    from benchmarks import reference_gpt as gpt

    sizes = gpt.Sizes(stages=args.stages)
    step, optimizer = gpt.make_step(sizes)
    batch = gpt.batch(sizes)
    params = gpt.init(sizes)

    def fresh() -> Any:
        copied = jax.tree.map(np.array, params)
        return [copied, jax.tree.map(np.asarray, optimizer.init(copied))]

    topology = mpmd.make_topology({f"m{s}": 1 for s in range(args.stages)})
    config = mpmd.make_config(
        topology, {f"stage{s}": f"m{s}" for s in range(args.stages)}, schedule=args.schedule
    )
    pipelined = mpmd.jit(step, config, donate_argnums=(0, 1))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    # Data parallel takes the whole batch at once: each device has its share of every step's rows.
    whole_batch = dataclasses.replace(sizes, microbatch=sizes.microbatch * sizes.microbatches, microbatches=1)
    data_parallel = jax.jit(gpt.make_step(whole_batch)[0], donate_argnums=(0, 1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    made = [
        Variant("mpmd", pipelined, fresh(), batch),
        Variant("jit_one_device", jitted, fresh(), batch),
        Variant(
            "jit_data_parallel",
            data_parallel,
            jax.device_put(fresh(), whole),
            jax.device_put(list(batch), split),
        ),
    ]
    programs = pipelined.compiled(*made[0].state, *batch).programs
    print(f"{len(programs)} programs: {', '.join(' = '.join(names) for names in programs)}")
    return made


def compiled_step(sizes: Any, schedule: str, compile_it: bool) -> Any:
    """The reference step of some sizes, lowered or compiled, with its arguments."""
    import mpmd
    from benchmarks import reference_gpt as gpt

    step, optimizer = gpt.make_step(sizes)
    params = gpt.init(sizes)
    arguments = (params, jax.tree.map(np.asarray, optimizer.init(params)), *gpt.batch(sizes))
    topology = mpmd.make_topology({f"m{s}": 1 for s in range(sizes.stages)})
    assignment = {f"stage{s}": f"m{s}" for s in range(sizes.stages)}
    config = mpmd.make_config(topology, assignment, schedule=schedule)
    lowered = mpmd.jit(step, config, donate_argnums=(0, 1)).lower(*arguments)
    return (lowered.compile() if compile_it else lowered), arguments


def overhead_us(stages: int, schedule: str) -> float:
    """Microseconds per instruction where the work in the fragments is next to nothing."""
    from benchmarks import reference_gpt as gpt

    tiny = gpt.Sizes(
        layers=stages, stages=stages, width=8, heads=1, sequence=4, vocabulary=8, microbatch=1,
        microbatches=16,
    )  # fmt: skip
    compiled, (params, state, *rest) = compiled_step(tiny, schedule, compile_it=True)
    times = []
    for _ in range(80):
        start = time.perf_counter()
        params, state, loss = compiled(params, state, *rest)
        jax.block_until_ready((params, state, loss))
        times.append(time.perf_counter() - start)
    instructions = sum(len(stream.instructions) for stream in compiled.program.streams)
    return 1e6 * statistics.median(times[20:]) / instructions


def boundary_bytes(microbatches: int, stages: int, schedule: str) -> dict[str, int]:
    """For each mesh the bytes held for received values and activations at the predicted peak."""
    from benchmarks import reference_gpt as gpt
    from mpmd.runtime.program.stream_memory import predict_memory

    small = gpt.Sizes(
        layers=stages, stages=stages, width=32, sequence=32, vocabulary=64, microbatches=microbatches
    )
    lowered, _ = compiled_step(small, schedule, compile_it=False)
    kinds = ("received", "activation")
    memory = predict_memory(lowered.program)
    return {m.mesh: sum(m.by_category.get(kind, 0) for kind in kinds) for m in memory}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.stages)
    runs = variants(args)
    for _ in range(args.rounds):
        for run in runs:
            run.measure(args.steps)
    figures: dict[str, Any] = {}
    for run in runs:
        wall, cpu = statistics.median(run.wall), statistics.median(run.cpu)
        figures[run.name] = {"wall_s": wall, "cpu_s": cpu, "first_call_s": run.first_call_s, "loss": run.loss}
        print(
            f"{run.name:18} {wall * 1e3:8.1f} ms  {cpu:6.3f} CPU-s  first call {run.first_call_s:5.1f} s"
            f"  loss {run.loss:.5f}"
        )
    ours, one, spmd = (figures[n] for n in ("mpmd", "jit_one_device", "jit_data_parallel"))
    figures["wall_ratio"] = ours["wall_s"] / one["wall_s"]
    figures["cpu_ratio"] = ours["cpu_s"] / one["cpu_s"]
    figures["wall_ratio_spmd"] = ours["wall_s"] / spmd["wall_s"]
    figures["overhead_us"] = overhead_us(args.stages, args.schedule)
    figures["boundary_bytes"] = {m: boundary_bytes(m, args.stages, args.schedule) for m in (4, 8, 16)}
    print(json.dumps(figures))


if __name__ == "__main__":
    script.run(main)
