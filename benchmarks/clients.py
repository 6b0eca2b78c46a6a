"""One CPU client for all meshes, or a client per mesh: which is faster?

    python benchmarks/clients.py [--rounds 7] [--steps 2]

The step of `train_step.py`, on 2 and 4 meshes of one device, native fragments; the topologies take turns in
one process.  The last line is one JSON object: seconds per step with a client per mesh and with one client,
and the second over the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script


def make_step(meshes: int, one_client: bool) -> Any:
    """A function that takes one step and keeps its state."""
    import mpmd
    from benchmarks import reference_gpt as gpt
    from mpmd.runtime.run.clients import made_devices

    sizes = gpt.Sizes(stages=meshes)
    step, optimizer = gpt.make_step(sizes)
    batch, params = gpt.batch(sizes), gpt.init(sizes)
    state = [jax.tree.map(np.array, params), jax.tree.map(np.asarray, optimizer.init(params))]
    counts = {f"m{s}": 1 for s in range(meshes)}
    devices = None if one_client else [d for own in made_devices(counts).values() for d in own]
    topology = mpmd.make_topology(counts, devices=devices, pinning="never" if one_client else "auto")
    assignment = {f"stage{s}": f"m{s}" for s in range(meshes)}
    jitted = mpmd.jit(step, mpmd.make_config(topology, assignment, schedule="1f1b"), donate_argnums=(0, 1))

    def take() -> None:
        nonlocal state
        *state, loss = jitted(*state, *batch)
        jax.block_until_ready((state, loss))

    return take


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    figures = {}
    for meshes in (2, 4):
        steps = {name: make_step(meshes, name == "one_client") for name in ("client_per_mesh", "one_client")}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for take in steps.values():
            take()
        for _ in range(args.rounds):
            for name, take in steps.items():
                start = time.perf_counter()
                for _ in range(args.steps):
                    take()
                times[name].append((time.perf_counter() - start) / args.steps)
        seconds = {name: statistics.median(taken) for name, taken in times.items()}
        seconds["ratio"] = seconds["one_client"] / seconds["client_per_mesh"]
        figures[f"{meshes} meshes"] = seconds
        print(f"{meshes} meshes: " + ", ".join(f"{name} {value:.3f}" for name, value in seconds.items()))
    print(json.dumps(figures))


if __name__ == "__main__":
    script.run(main)
