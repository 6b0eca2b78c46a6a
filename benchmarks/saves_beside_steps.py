"""How much longer steps take while a checkpoint is written beside them.

    python benchmarks/saves_beside_steps.py [--rounds 8] [--steps 12] [--layers 8] [--width 512] [--rows 512]

Runs of steps take turns: so many without a checkpoint; at least as many while a `Saver` writes one, until it
is complete; and as many after `mpmd.checkpoint.save`.  A save costs the time of its run less the time that as
many steps take without one in the same round; the median over rounds.  In percent it is of the steps between
two checkpoints, if there is one in `--every` steps.  `cpu` is the same of the CPU time of all threads, which
other load on the machine hardly changes.  `held_up_ms` is the time in which the call of a `Saver` returns,
and `steps_beside` the steps of such a run.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from benchmarks import script
from examples.workloads.steps import pipelined, sgd_momentum, training_step

KINDS = ("without", "beside", "before")


def compiled_step(layers: int, width: int, rows: int) -> tuple[Any, Any, tuple[Any, ...]]:
    """A compiled step of two stages on two meshes, its state, and a batch."""

    def stage(params: Any, x: jax.Array) -> jax.Array:
        for up, down in params:
            x = x + jnp.tanh(x @ up) @ down
        return x

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = mpmd.named_computation(stage, name="stage0")(params["lower"], x)
        last = mpmd.named_computation(lambda p, h, y: jnp.mean((stage(p, h) - y) ** 2), name="stage1")
        return last(params["upper"], h, y)

    draw = np.random.default_rng(0)

    def layer() -> tuple[np.ndarray, np.ndarray]:
        up = draw.normal(size=(width, 4 * width)) / width
        return up.astype(np.float32), up.T.copy().astype(np.float32)

    params = {half: [layer() for _ in range(layers // 2)] for half in ("lower", "upper")}
    batch = tuple(draw.normal(size=(2, rows, width)).astype(np.float32))
    start, update = sgd_momentum(0.01)
    state = start(params)
    step = pipelined(training_step(loss, 4, update), 2, donate_argnums=0)
    compiled = step.compiled(state, *batch)
    state, _ = compiled(state, *batch)
    return compiled, state, batch


class RunTimes(NamedTuple):
    """What a run took: its steps, its time, and the CPU time of all threads."""

    steps: int
    wall: float
    cpu: float

    def more_than(self, other: RunTimes) -> tuple[float, float]:
        """Time and CPU time beyond as many steps of another run."""
        as_many = self.steps / other.steps
        return self.wall - as_many * other.wall, self.cpu - as_many * other.cpu


class Runs:
    """Runs of steps, each with the state that the one before left."""

    def __init__(self, compiled: Any, state: Any, batch: tuple[Any, ...], steps: int, folder: Path) -> None:
        self._compiled, self._state, self._batch = compiled, state, batch
        self._steps, self._folder, self._number = steps, folder, 0
        self.held_up: list[float] = []

    def run(self, kind: str, saver: mpmd.checkpoint.Saver) -> RunTimes:
        """One run, and its checkpoint."""
        jax.block_until_ready(self._state)
        self._number += 1
        written = self._folder / str(self._number)
        start, cpu, steps = time.perf_counter(), time.process_time(), 0
        if kind == "beside":
            saver.save(self._number, self._state)
            self.held_up.append(time.perf_counter() - start)
        elif kind == "before":
            mpmd.checkpoint.save(self._folder, self._number, self._state)
        while steps < self._steps or (kind == "beside" and not written.exists()):
            self._state, loss = self._compiled(self._state, *self._batch)
            float(loss)
            steps += 1
        jax.block_until_ready(self._state)
        taken = RunTimes(steps, time.perf_counter() - start, time.process_time() - cpu)
        saver.wait()
        return taken


def measure(rounds: int, steps: int, layers: int, width: int, rows: int, every: int) -> dict[str, float]:
    """The figures; `every` is the number of steps between two checkpoints of a job."""
    compiled, state, batch = compiled_step(layers, width, rows)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    found: dict[str, list[RunTimes]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, mpmd.checkpoint.Saver(folder) as saver:
        runs = Runs(compiled, state, batch, steps, Path(folder))
        del state
        for kind in KINDS:  # first: threads, pages and files
            runs.run(kind, saver)
        runs.held_up.clear()
        for number in range(rounds):
            for kind in (*KINDS[number % 3 :], *KINDS[: number % 3]):
                found[kind].append(runs.run(kind, saver))
            last = ", ".join(f"{kind} {found[kind][-1].wall:.3f} s" for kind in KINDS)
            print(f"round {number}: {last}", flush=True)
    step = statistics.median(run.wall for run in found["without"]) / steps
    figures = {"step_ms": 1e3 * step, "state_mib": state_bytes / 2**20}
    for kind in KINDS[1:]:
        pairs = [one.more_than(other) for one, other in zip(found[kind], found["without"], strict=True)]
        more, cpu = (statistics.median(of) for of in zip(*pairs, strict=True))
        figures |= {f"{kind}_ms": 1e3 * more, f"{kind}_percent": 100 * more / (every * step)}
        figures[f"{kind}_cpu_ms"] = 1e3 * cpu
    figures["held_up_ms"] = 1e3 * statistics.median(runs.held_up)
    figures["steps_beside"] = statistics.median(run.steps for run in found["beside"])
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"rounds": 8, "steps": 12, "layers": 8, "width": 512, "rows": 512, "every": 100}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    jax.config.update("jax_num_cpu_devices", 2)
    print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    script.run(main)
