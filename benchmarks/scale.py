"""Do partitioning, verification and simulation stay linear for large programs?  Nothing is executed.

    python benchmarks/scale.py [--meshes 256,512,1024] [--microbatches 64] [--stages 16x64,32x128,64x256]

* `streams`: a 1F1B pipeline of as many meshes, each in a process of its own, is linearized, verified and
  simulated.
* `partition`: a chain of small layers, stages x microbatches, is traced, partitioned, scheduled, linearized.

Every size has a process of its own.  The last line is one JSON object: for each size CPU seconds, the most
memory of the process beyond its imports, in MiB, instructions or tasks, and both per one of them;
`streams_growth` and `partition_growth` are the largest size's figures per unit over the smallest's: 1
where time (first) and memory (second) are linear.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import mpmd  # noqa: E402
from benchmarks import script  # noqa: E402
from examples.workloads.graphs import one_f_one_b  # noqa: E402
from mpmd.estimate.program_timeline import predicted_timeline  # noqa: E402
from mpmd.runtime.program.linearize import linearize  # noqa: E402
from mpmd.runtime.program.order import InstructionOrder  # noqa: E402
from mpmd.runtime.program.verify_streams import verify  # noqa: E402

WIDTH = 8


def peak_mib() -> float:
    """The most memory that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def streams(meshes: int, microbatches: int) -> dict[str, float]:
    """CPU seconds of each phase for a program of so many meshes."""
    graph = one_f_one_b(meshes, microbatches)
    before, start = peak_mib(), time.process_time()
    program = linearize(graph, {f"m{m}": (m,) for m in range(meshes)})
    linearized = time.process_time()
    order: InstructionOrder = verify(program)
    verified = time.process_time()
    timeline = predicted_timeline(program, None, [f"m{m}" for m in range(meshes)])
    simulated = time.process_time()
    assert len(order.nodes) == program.num_instructions and timeline.makespan_s > microbatches
    return {
        "units": program.num_instructions,
        "seconds": simulated - start,
        "linearize_s": linearized - start,
        "verify_s": verified - linearized,
        "simulate_s": simulated - verified,
        "mib": peak_mib() - before,
    }


def partition(stages: int, microbatches: int) -> dict[str, float]:
    """CPU seconds and memory of a step of so many tasks, up to its streams."""
    jax.config.update("jax_num_cpu_devices", stages)

    def loss(params: Any, x: Any) -> Any:
        for s in range(stages):
            x = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name=f"stage{s}")(params[s], x)
        return jnp.mean(x**2)

    def step(params: Any, x: Any) -> Any:
        value, grads = mpmd.accumulate_gradients(loss, microbatches)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    topology = mpmd.make_topology({f"m{s}": 1 for s in range(stages)}, pinning="never")
    assignment = {f"stage{s}": f"m{s}" for s in range(stages)}
    jitted = mpmd.jit(step, mpmd.make_config(topology, assignment, schedule="1f1b"), donate_argnums=0)
    params = [np.ones((WIDTH, WIDTH), np.float32) for _ in range(stages)]
    batch = np.ones((microbatches, WIDTH), np.float32)
    before, start = peak_mib(), time.process_time()
    program = jitted.lower(params, batch).program
    seconds = time.process_time() - start
    assert len(program.streams) == stages
    units = 2 * stages * microbatches
    return {"units": units, "seconds": seconds, "mib": peak_mib() - before}


def in_a_process(what: str, first: int, second: int, limit: float) -> dict[str, Any]:
    """The figures of one size."""
    command = [sys.executable, __file__, "--child", what, str(first), str(second)]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{what} {first} x {second}: not done after {limit:g} s", flush=True)
        return {}
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found = dict[str, Any](json.loads(done.stdout.splitlines()[-1]))
    found["us_per_unit"] = found["seconds"] / found["units"] * 1e6
    found["kib_per_unit"] = found["mib"] / found["units"] * 1024
    figures = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
    print(f"{what} {first} x {second}: {figures} ({time.perf_counter() - begin:.0f} s in all)", flush=True)
    return found


def growth(sizes: list[dict[str, Any]]) -> list[float]:
    """The largest size over the smallest, per unit: time and memory."""
    done = [size for size in sizes if size]
    keys = ("us_per_unit", "kib_per_unit")
    return [done[-1][key] / done[0][key] for key in keys] if len(done) > 1 else []


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", default="256,512,1024", help="sizes of the streams")
    parser.add_argument("--microbatches", type=int, default=64, help="of the streams")
    parser.add_argument("--stages", default="16x64,32x128,64x256", help="sizes that are partitioned")
    parser.add_argument("--limit", type=float, default=900, help="seconds that one size may take")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run = streams if args.child[0] == "streams" else partition
        print(json.dumps(run(int(args.child[1]), int(args.child[2]))))
        return
    sizes = [(int(m), args.microbatches) for m in args.meshes.split(",") if m]
    pairs = [pair.split("x") for pair in args.stages.split(",") if pair]
    of_streams = [in_a_process("streams", *size, args.limit) for size in sizes]
    of_partition = [in_a_process("partition", int(s), int(m), args.limit) for s, m in pairs]
    result = {
        "streams": of_streams,
        "partition": of_partition,
        "streams_growth": growth(of_streams),
        "partition_growth": growth(of_partition),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    script.run(main)
