"""Does a run whose processes are killed go on with the loss curve of an undisturbed run?

    python -m benchmarks.restarts [--runs 20] [--processes 2] [--seed 0]

Every run is `mpmd-run --max-restarts 3` of a small training program that saves a checkpoint every third step.
One of its processes gets SIGKILL at a random moment: while it starts, compiles, steps or saves.  The last
line is one JSON object: `{"runs": 20, "killed": 20, "restarts_equal": 20, ...}`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS, EVERY, WIDTH, ROWS = 12, 3, 16, 8
STEP_SECONDS = 0.03
RUN_SECONDS = 400


def train(folder: Path) -> None:
    """The program under `mpmd-run`: goes on from the newest checkpoint, if there is one."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd

    count = jax.process_count()

    def init(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, count)
        params = {f"s{k}": jax.random.normal(keys[k], (WIDTH, WIDTH)) * 0.3 for k in range(count)}
        return {"params": params, "momenta": jax.tree.map(jnp.zeros_like, params)}

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for k in range(count - 1):
            x = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name=f"stage{k}")(params[f"s{k}"], x)
        last = mpmd.named_computation(lambda w, x, y: jnp.mean((x @ w - y) ** 2), name=f"stage{count - 1}")
        return last(params[f"s{count - 1}"], x, y)

    topology = mpmd.make_topology({f"m{k}": 1 for k in range(count)})
    config = mpmd.make_config(topology, {f"stage{k}": f"m{k}" for k in range(count)}, schedule="1f1b")

    @mpmd.jit(config, donate_argnums=0)
    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = mpmd.accumulate_gradients(loss, 2)(state["params"], x, y)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
        return {
            "params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momenta),
            "momenta": momenta,
        }, value

    def batch(number: int) -> np.ndarray:
        return np.random.default_rng(number).normal(size=(2, ROWS, WIDTH)).astype(np.float32)

    key = jax.random.key(0)
    compiled = step.compiled(jax.eval_shape(init, key), *batch(0))
    losses: list[str] = []
    if mpmd.checkpoint.steps(folder):
        _, state, extra = mpmd.checkpoint.restore(folder, compiled.abstract_args[0])
        losses = extra["losses"]
    else:
        state = compiled.init(init, key)
    while len(losses) < STEPS:
        state, value = compiled(state, *batch(len(losses)))
        losses.append(float(value).hex())
        if jax.process_index() == 0:
            print(f"step {len(losses)}", flush=True)
        time.sleep(STEP_SECONDS)
        if len(losses) % EVERY == 0:
            mpmd.checkpoint.save(folder, len(losses), state, {"losses": losses})


def run(processes: int, folder: Path, chosen: random.Random | None) -> dict[str, Any]:
    """One run; with `chosen` a process of it is killed.  Its losses, and what happened."""
    command = [
        "-m",
        "mpmd.tools.run",
        "-n",
        str(processes),
        "--max-restarts",
        "3",
        "-m",
        "benchmarks.restarts",
    ]
    log = ""
    with subprocess.Popen(
        [sys.executable, *command, "--train", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as child:
        limit = threading.Timer(RUN_SECONDS, child.terminate)
        limit.start()
        moment = chosen.choice([0, *range(1, STEPS)]) if chosen else STEPS + 1
        if moment == 0 and chosen is not None:
            time.sleep(chosen.uniform(1.0, 6.0))
            killed = kill_one(child.pid, chosen)
        else:
            killed = None
        assert child.stdout is not None
        for line in child.stdout:
            log += line
            if chosen is not None and killed is None and re.search(rf"step {moment}$", line.rstrip()):
                time.sleep(chosen.uniform(0.0, 2 * STEP_SECONDS))
                killed = kill_one(child.pid, chosen)
        code = child.wait()
        limit.cancel()
    return {
        "code": code,
        "moment": moment,
        "killed": killed is not None,
        "restarted": log.count("starting again"),
        "losses": losses_of(folder),
        "left": sorted(entry.name for entry in folder.iterdir() if not entry.name.isdigit()),
        "log": log,
    }


def kill_one(parent: int, chosen: random.Random) -> int | None:
    """Sends SIGKILL to one of the processes that a process has started; its id."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    if not found:
        return None
    pid = chosen.choice(sorted(found))
    os.kill(pid, signal.SIGKILL)
    return pid


def losses_of(folder: Path) -> list[str]:
    """The loss curve in the newest checkpoint."""
    import mpmd

    losses: list[str] = mpmd.checkpoint.extra(folder)["losses"] if mpmd.checkpoint.steps(folder) else []
    return losses


def campaign(runs: int, processes: int, seed: int) -> dict[str, Any]:
    """Compares runs of which a process is killed with one that is not disturbed."""
    chosen, started = random.Random(seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        alone = run(processes, Path(name) / "alone", None)
        if alone["code"] or len(alone["losses"]) != STEPS:
            raise SystemExit(f"the undisturbed run failed:\n{alone['log']}")
        killed = equal = restarts = 0
        for number in range(runs):
            found = run(processes, Path(name) / str(number), chosen)
            good = found["code"] == 0 and found["losses"] == alone["losses"] and not found["left"]
            killed, equal, restarts = killed + found["killed"], equal + good, restarts + found["restarted"]
            print(
                f"run {number}: killed after step {found['moment']}, {'equal' if good else 'NOT EQUAL'}",
                flush=True,
            )
            if not good:
                steps = f"{len(found['losses'])} of {STEPS} losses, equal as far as they go: "
                steps += str(found["losses"] == alone["losses"][: len(found["losses"])])
                print(f"exit code {found['code']}, left {found['left']}, {steps}", flush=True)
                print(found["log"][-3000:], flush=True)
    seconds = round(time.perf_counter() - started)
    return {"runs": runs, "killed": killed, "restarts": restarts, "restarts_equal": equal, "seconds": seconds}


def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Kills processes, and compares loss curves after restarts.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(list(arguments))
    if found.train is not None:
        train(found.train)
        return
    print(json.dumps(campaign(found.runs, found.processes, found.seed)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
