"""Does a run whose processes are killed go on with the loss curve of an undisturbed run?

    python -m benchmarks.restarts [--runs 20] [--processes 2] [--seed 0] [--at-once 2] [--done FILE]

Every run is `mpmd-run --max-restarts 3` of a small training program that saves a checkpoint every third step.
One of its processes gets SIGKILL at a random moment: while it starts, compiles, steps or saves.

With `--done` each result is added to a file as well, and runs in the file are not run again.  The last line
is one JSON object: `{"runs": 20, "killed": 20, "restarts_equal": 20, ...}`.
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
from concurrent import futures
from pathlib import Path
from typing import Any

STEPS, EVERY, WIDTH, ROWS = 12, 3, 16, 8
STEP_SECONDS = 0.03
UNDISTURBED = -1
POLL_SECONDS, RUN_POLLS = 0.2, 1500


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
        ended = threading.Event()
        threading.Thread(target=end_late, args=(child, ended), daemon=True).start()
        moment = chosen.choice([0, *range(1, STEPS)]) if chosen else STEPS + 1
        strike = Strike(child.pid, chosen)
        if moment == 0 and chosen is not None:
            strike.within(chosen.uniform(1.0, 6.0))
        assert child.stdout is not None
        for line in child.stdout:
            log += line
            if re.search(rf"step {max(moment, 1)}$", line.rstrip()):
                strike.now(2 * STEP_SECONDS if moment else 0.0)
        code = child.wait()
        ended.set()
    return {
        "code": code,
        "moment": moment,
        "killed": strike.killed is not None,
        "restarted": log.count("starting again"),
        "losses": losses_of(folder),
        "left": sorted(entry.name for entry in folder.iterdir() if not entry.name.isdigit()),
        "log": log,
    }


class Strike:
    """Kills one of the processes that a process has started, once; never, if none is chosen.

    Attributes:
        killed: the id of the killed one.
    """

    def __init__(self, parent: int, chosen: random.Random | None) -> None:
        self._parent, self._chosen, self._once = parent, chosen, threading.Lock()
        self.killed: int | None = None

    def within(self, seconds: float) -> None:
        """Kills after so many seconds, unless it happens before."""
        timer = threading.Timer(seconds, self.now)
        timer.daemon = True
        timer.start()

    def now(self, delay: float = 0.0) -> None:
        """Kills after a random part of a delay, in seconds, unless it happened before."""
        with self._once:
            if self._chosen is not None and self.killed is None:
                time.sleep(self._chosen.uniform(0.0, delay))
                self.killed = kill_one(self._parent, self._chosen)


def end_late(child: subprocess.Popen[str], ended: threading.Event) -> None:
    """Ends a run that takes too many polls: a machine that stops everything for a while ends none."""
    if not any(ended.wait(POLL_SECONDS) for _ in range(RUN_POLLS)):
        child.terminate()


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


def campaign(
    runs: int, processes: int, seed: int, at_once: int = 2, log: Path | None = None
) -> dict[str, Any]:
    """Compares runs in which a process is killed with an undisturbed run.

    Run `UNDISTURBED` is the reference.  Runs whose results `log` has are not repeated.
    """
    started = time.perf_counter()
    known = (
        [json.loads(line) for line in log.read_text().splitlines()]
        if log is not None and log.exists()
        else []
    )
    results: dict[int, dict[str, Any]] = {result["run"]: result for result in known}
    writing = threading.Lock()

    def result_of(number: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            chosen = None if number == UNDISTURBED else random.Random(f"{seed}/{number}")
            found = {"run": number, **run(processes, Path(name) / "checkpoints", chosen)}
        with writing:
            print(f"run {number}: exit code {found['code']}, {found['restarted']} restarts", flush=True)
            results[number] = found
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(found) + "\n")

    if UNDISTURBED not in results:
        result_of(UNDISTURBED)
    alone = results[UNDISTURBED]
    if alone["code"] or len(alone["losses"]) != STEPS:
        raise SystemExit(f"the undisturbed run failed:\n{alone['log']}")
    with futures.ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(result_of, [number for number in range(runs) if number not in results]):
            pass
    disturbed = [results[number] for number in range(runs)]
    good = [is_equal(found, alone["losses"]) for found in disturbed]
    return {
        "runs": runs,
        "killed": sum(found["killed"] for found in disturbed),
        "restarts": sum(found["restarted"] for found in disturbed),
        "restarts_equal": sum(good),
        "seconds": round(time.perf_counter() - started),
    }


def is_equal(found: dict[str, Any], losses: Sequence[str]) -> bool:
    """Whether a run ended as the undisturbed one; prints it, and why if it did not."""
    good = found["code"] == 0 and found["losses"] == losses and not found["left"] and found["killed"]
    equal = "equal" if good else "NOT EQUAL"
    print(f"run {found['run']}: killed after step {found['moment']}, {equal}", flush=True)
    if not good:
        as_far = found["losses"] == losses[: len(found["losses"])]
        steps = f"{len(found['losses'])} of {STEPS} losses, equal as far as they go: {as_far}"
        print(f"exit code {found['code']}, killed: {found['killed']}, left {found['left']}, {steps}")
        print(found["log"][-3000:], flush=True)
    return bool(good)


def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Kills processes, and compares loss curves after restarts.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--done", type=Path, default=None)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(list(arguments))
    if found.train is not None:
        train(found.train)
        return
    print(
        json.dumps(campaign(found.runs, found.processes, found.seed, found.at_once, found.done)), flush=True
    )


if __name__ == "__main__":
    main(sys.argv[1:])
