"""How much memory does a process of several take, beside one that uses JAX alone?

    python benchmarks.resident.py [--processes 16]

A chain of small layers is trained in as many processes at once, one stage in each, and in as many by
`jax.jit` of all of it.  `memory_over_jax` is the quotient of the means of a process: pages that several
processes map, those of libraries above all, are divided between them (PSS).  `resident_over_jax` counts them
in each (RSS).  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

WIDTH, MICROBATCHES, STEPS = 8, 4, 3
SECONDS = 600


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """One stage."""
    return jnp.tanh(x @ w)


def step_of(stages: list[Callable[..., Any]], value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    """A train step of a chain."""

    def loss(params: list[Any], x: jax.Array) -> jax.Array:
        for stage, w in zip(stages, params, strict=True):
            x = stage(w, x)
        return jnp.mean(x**2)

    def step(params: list[Any], x: jax.Array) -> tuple[list[Any], jax.Array]:
        value, grads = value_and_grad(loss)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    return step


def by_jax(count: int) -> Callable[..., Any]:
    """The step compiled by JAX alone."""
    return jax.jit(step_of([layer] * count, jax.value_and_grad), donate_argnums=0)


def by_mpmd(count: int) -> Callable[..., Any]:
    """The step with one stage in each process."""
    import mpmd  # not in the processes that use JAX alone

    stages = [mpmd.named_computation(layer, name=f"stage{s}") for s in range(count)]
    topology = mpmd.make_topology({f"m{s}": 1 for s in range(count)})
    config = mpmd.make_config(topology, {f"stage{s}": f"m{s}" for s in range(count)}, schedule="1f1b")
    step = step_of(stages, lambda loss: mpmd.accumulate_gradients(loss, MICROBATCHES))
    return mpmd.jit(step, config, donate_argnums=0)


def memory_after_steps(ours: bool) -> dict[str, float]:
    """MiB of this process, when all have trained and none has ended."""
    count = jax.process_count()
    step = (by_mpmd if ours else by_jax)(count)
    params: Any = [np.ones((WIDTH, WIDTH), np.float32) for _ in range(count)]
    for _ in range(STEPS):
        params, value = step(params, np.ones((MICROBATCHES, WIDTH), np.float32))
        float(value)
    multihost_utils.sync_global_devices("trained")
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split()[0]: int(line.split()[1]) / 1024 for line in lines}
    multihost_utils.sync_global_devices("measured")
    return {"pss": sizes["Pss:"], "rss": sizes["Rss:"]}


def mean_memory(processes: int, ours: bool) -> dict[str, float]:
    """The mean of so many processes, which run at once."""
    command = [
        sys.executable,
        "-m",
        "mpmd.tools.run",
        "-n",
        str(processes),
        "-m",
        "benchmarks.resident",
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--child", "mpmd" if ours else "jax"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    if len(found) != processes:
        raise SystemExit(f"{len(found)} of {processes} processes reported")
    mean = {key: statistics.mean(of[key] for of in found) for key in ("pss", "rss")}
    print(f"{processes} processes, {'mpmd' if ours else 'jax'}: MiB of each {mean}", flush=True)
    return mean


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=16, help="how many run at once")
    parser.add_argument("--child", choices=("mpmd", "jax"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(memory_after_steps(args.child == "mpmd")), flush=True)
        return
    alone, ours = mean_memory(args.processes, False), mean_memory(args.processes, True)
    result = {"memory_over_jax": ours["pss"] / alone["pss"], "resident_over_jax": ours["rss"] / alone["rss"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
