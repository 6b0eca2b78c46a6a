"""How far is a dry run from a measured step?

    python benchmarks/dry_run.py [--processes 4] [--rounds 3] [--only mlp-1024 transformer]

Each job is forecast by `mpmd-run --dry-run` and then run in so many processes of this machine, in turns,
with nothing else beside.  A line of JSON for each: predicted and measured seconds of a step, their ratio, and
for each mesh the bytes of arrays at their peak, predicted over held; scratch memory cannot be observed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOBS = {
    "mlp-256": ("mlp", "256", "4096"),
    "mlp-512": ("mlp", "512", "4096"),
    "mlp-1024": ("mlp", "1024", "2048"),
    "transformer": ("transformer", "256", "32"),
}
"""Name → the model, its width, the rows of a batch."""
_SCRATCH = ("workspace", "kept")


def job(model: str, width: int, rows: int) -> None:
    """What runs in each process: some steps, and the seconds and bytes of one, by process 0."""
    import jax

    sys.path.insert(0, str(ROOT))
    from examples.workloads.dry_jobs import job_of

    step, init, batch = job_of(model, width, rows)
    compiled = step.compiled(jax.eval_shape(init), *batch)  # a dry run ends here
    state = compiled.arguments.init(init)
    state, _ = step(state, *batch)
    seconds = []
    import time

    for _ in range(12):
        begin = time.perf_counter()
        state, loss = step(state, *batch)
        float(loss)
        jax.block_until_ready([a for a in jax.tree.leaves(state) if a.is_fully_addressable])
        seconds.append(time.perf_counter() - begin)
    _, live = compiled.measure.live_bytes(state, *batch)
    if jax.process_index() == 0:
        print(json.dumps({"step_s": statistics.median(seconds[2:]), "live": live}))


def forecast(processes: int, arguments: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        launch(processes, ["--dry-run", "--out", folder], arguments)
        return json.loads((Path(folder) / "forecast.json").read_text())


def launch(processes: int, options: list[str], arguments: tuple[str, ...]) -> str:
    command = [sys.executable, "-m", "mpmd.tools.run", "-n", str(processes), *options, __file__, "--job"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout


def compared(processes: int, rounds: int, arguments: tuple[str, ...]) -> dict[str, Any]:
    predicted, measured = [], []
    for _ in range(rounds):
        predicted.append(forecast(processes, arguments))
        measured.append(json.loads(launch(processes, [], arguments).partition("{")[2].join(["{", ""])))
    step = statistics.median(p["step_s"] for p in predicted)
    real = statistics.median(m["step_s"] for m in measured)
    held = {
        mesh: sum(size for kind, size in of.items() if kind not in _SCRATCH)
        for mesh, of in predicted[0]["held_bytes"].items()
    }
    live = measured[0]["live"]
    return {
        "predicted_s": round(step, 4),
        "measured_s": round(real, 4),
        "time_ratio": round(step / real, 3),
        "memory_ratio": {mesh: round(held[mesh] / live[mesh], 3) for mesh in held},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(JOBS))
    parser.add_argument("--job", nargs=3)
    given = parser.parse_args()
    if given.job:
        job(given.job[0], int(given.job[1]), int(given.job[2]))
        return
    for name in given.only:
        print(json.dumps({"job": name, **compared(given.processes, given.rounds, JOBS[name])}), flush=True)


if __name__ == "__main__":
    main()
