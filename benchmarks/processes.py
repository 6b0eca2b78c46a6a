"""Several processes against one: equal numbers, overlap, cost, faults, and restarts.

    python benchmarks/processes.py [--faults 200] [--restarts 20] [--steps 8] [--rounds 5]
        [--only efficiency,example,faults,restarts] [--done FOLDER]

* `equal`: the example, in four processes and in one, gives the same losses and parameters, bit by bit.
* `efficiency_4`: in four processes, stages sleep 20 ms in a forward and 40 ms in a backward, and messages
  have 4 MB: the part of a step, of the median of `--steps`, that ideal 1F1B takes, in which nothing but the
  sleep costs anything.  Its schedule is `efficiency_schedule`; `efficiencies` has every one that ran.  Under
  `1f1b` each task of the first and last microbatches waits for a message that was sent when the task before
  it ended, so that the latency of a message counts at every stage twice; `eager_1f1b` holds more microbatches
  and leaves each message the time of a task.
* `example_over_one_process`: seconds of the example's step in four processes, over those in one process, on
  the same cores.  The two take turns, of four times `--steps`; of each the median of its turns counts, where
  a turn is the median of its steps.  `example_over_one_process_least` compares the least turns: one process
  has a turn that is 7 % faster now and then.
* `detect_s`, `faults`, `hangs`: `tests/support/fault_campaign.py`; `detect_s` is the longest time from a
  fault to the error of another process, `faults` counts those that left a trace, `wrong` other errors.
* `restarts_equal`: `benchmarks/restarts.py`: how many runs with a process that got SIGKILL end with the loss
  curve of an undisturbed run.

With `--done` results of faults and restarts are kept in a folder: a run that was ended goes on from there.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks import script  # noqa: E402

PROCESSES, ROWS, WIDTH = 4, 1024, 1024
FORWARD_S, HALF_BACKWARD_S = 0.02, 0.02
ROUND_SECONDS = 180


def sleeping(schedule: str, microbatches: int, steps: int) -> dict[str, Any]:
    """In each of the processes: seconds of steps of stages that sleep."""
    from examples.workloads.sleeping import Durations, Stages

    durations = Durations(FORWARD_S, HALF_BACKWARD_S, HALF_BACKWARD_S)
    stages = Stages((durations,) * PROCESSES, microbatches, PROCESSES, width=WIDTH, rows=ROWS)
    jitted = stages.jitted(schedule)
    params, batch = stages.arguments()
    seconds = []
    for number in range(steps + 2):  # the first compiles, the second takes fresh memory
        start = time.perf_counter()
        params, loss = jitted(params, batch)
        float(loss)
        if number > 1:
            seconds.append(time.perf_counter() - start)
    return {"ideal_s": stages.ideal_1f1b_s(), "seconds": seconds}


def example(steps: int) -> dict[str, Any]:
    """Seconds of steps of the pipelined transformer, its losses, and a digest of the parameters."""
    import mpmd
    from examples.pipelined_transformer.config import TrainConfig
    from examples.pipelined_transformer.train_step import make_state, make_train_step

    config = TrainConfig(num_stages=PROCESSES)
    shape = config.batch_size, config.seq_len + 1
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
    state = jax.device_get(make_state(config))
    step = make_train_step(config)
    seconds, losses = [], []
    for number in range(steps + 2):
        start = time.perf_counter()
        state, loss = step(state, tokens)
        losses.append(float(loss).hex())
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(state) if leaf.is_fully_addressable])
        if number > 1:
            seconds.append(time.perf_counter() - start)
    leaves = jax.tree.leaves(mpmd.fetch(state.params))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    return {"seconds": seconds, "losses": losses, "params": digest}


def in_processes(count: int, *arguments: str) -> list[dict[str, Any]]:
    """What each of `count` processes found, in a fresh start."""
    own = [sys.executable] if count == 1 else [sys.executable, "-m", "mpmd.tools.run", "-n", str(count)]
    command = [*own, "-m", "benchmarks.processes", "--child", *arguments]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=ROUND_SECONDS
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    lines = [line.rpartition("] {")[2] for line in done.stdout.splitlines() if "{" in line]
    return [json.loads(line if line.startswith("{") else "{" + line) for line in lines]


def efficiency(steps: int) -> dict[str, float]:
    """For each schedule and number of microbatches the part of a step that the ideal one takes."""
    found = {}
    for schedule, microbatches in (("1f1b", 8), ("eager_1f1b", 8), ("eager_1f1b", 16)):
        results = in_processes(PROCESSES, "sleeping", schedule, str(microbatches), str(steps))
        measured = max(statistics.median(result["seconds"]) for result in results)
        name = f"{schedule}, {microbatches} microbatches"
        found[name] = results[0]["ideal_s"] / measured
        print(f"{name}: {measured:.4f} s, ideal {results[0]['ideal_s']:.2f}: {found[name]:.4f}", flush=True)
    return found


def compared_example(steps: int, rounds: int) -> dict[str, Any]:
    """Whether the example is equal in one and in several processes, and the ratio of their steps."""
    one, several = [], []
    for _ in range(rounds):
        one += in_processes(1, "example", str(4 * steps))
        of_all = in_processes(PROCESSES, "example", str(4 * steps))
        several.append(of_all)
    medians = [statistics.median(result["seconds"]) for result in one]
    slowest = [max(statistics.median(result["seconds"]) for result in results) for results in several]
    print(f"example: one process {medians}, {PROCESSES} processes {slowest}", flush=True)
    numbers = {(tuple(r["losses"]), r["params"]) for r in [*one, *(r for of in several for r in of)]}
    return {
        "equal": len(numbers) == 1,
        "example_over_one_process": statistics.median(slowest) / statistics.median(medians),
        "example_over_one_process_least": min(slowest) / min(medians),
    }


def campaign(module: str, *arguments: str, done: Path | None) -> dict[str, Any]:
    """The last line of a campaign, whose other lines are printed as they come."""
    kept = [] if done is None else ["--done", str(done / f"{module.rpartition('.')[2]}.jsonl")]
    command = [sys.executable, "-u", "-W", "ignore", "-m", module, *arguments, *kept]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    line = ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return dict[str, Any](json.loads(line))


def child(arguments: list[str]) -> None:
    """One process of a case."""
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", PROCESSES)
    what, *rest = arguments
    if what == "sleeping":
        found = sleeping(rest[0], int(rest[1]), int(rest[2]))
    else:
        found = example(int(rest[0]))
    print(json.dumps(found), flush=True)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each case")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the example")
    parser.add_argument("--only", default="efficiency,example,faults,restarts", help="which parts")
    parser.add_argument("--faults", type=int, default=200, help="how many are injected")
    parser.add_argument("--restarts", type=int, default=20, help="runs in which a process is killed")
    parser.add_argument(
        "--done", type=Path, default=None, help="folder that keeps results of faults and restarts"
    )
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    if args.done is not None:
        args.done.mkdir(parents=True, exist_ok=True)
    parts, result = args.only.split(","), dict[str, Any]()
    if "efficiency" in parts:
        found = efficiency(args.steps)
        best = max(found, key=lambda name: found[name])
        result |= {"efficiency_4": found[best], "efficiency_schedule": best, "efficiencies": found}
    if "example" in parts:
        result |= compared_example(args.steps, args.rounds)
    if "faults" in parts:
        found = campaign("tests.support.fault_campaign", str(args.faults), done=args.done)
        result |= {**found, "wrong": len(found["wrong"])}
    if "restarts" in parts:
        result |= campaign("benchmarks.restarts", "--runs", str(args.restarts), done=args.done)
    print(json.dumps(result))


if __name__ == "__main__":
    script.run(main)
