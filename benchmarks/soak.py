"""Does a long run stay as it began, and does every fault end in one right error and a working next step?

    python benchmarks/soak.py [--steps 2000] [--faults 200]

First a small pipelined step is taken many times: resident memory is fitted with a line over the second half,
and threads and open files are counted.  Then faults are put into steps of the same program: a device that
breaks or has no memory left in some fragment of some microbatch, a NaN, an interrupt.  The error must name
the fragment's mesh and microbatch, and the same step without the fault must give what it
gave before.  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpmd
from benchmarks import script
from examples.workloads.sleeping import BROKEN, OUT_OF_MEMORY, sleep

WIDTH, ROWS, STAGES, MICROBATCHES = 16, 4, 2, 4
KINDS = ("broken", "out of memory", "nan", "interrupt")
CAUSES = {"broken": "the device is broken", "out of memory": "RESOURCE_EXHAUSTED", "nan": "NaN"}
VALUES = {"broken": BROKEN, "out of memory": OUT_OF_MEMORY, "nan": -2.0, "interrupt": 0.25}
INTERRUPT_AFTER_S, INTERRUPT_WITHIN_S = 0.03, 1.0


@jax.custom_vjp
def product(w: Any, x: Any, waits: Any) -> Any:
    """`x @ w`; `waits` are what `sleep` is given, forwards and backwards; below -1 the third makes a NaN."""
    return x @ w + sleep(waits[0], x) + jnp.log1p(waits[2])


def _backward(saved: Any, g: Any) -> Any:
    w, x, waits = saved
    g = g + sleep(waits[1], g)
    return x.T @ g, g @ w.T, jnp.zeros_like(waits)


product.defvjp(lambda w, x, waits: (product(w, x, waits), (w, x, waits)), _backward)


def loss_fn(params: Any, x: Any, waits: Any) -> Any:
    """A loss of two stages; `waits` is `f32[rows, stages, 3]`."""
    for s in range(STAGES):

        def layer(w: Any, x: Any, waits: Any, last: bool = s == STAGES - 1) -> Any:
            x = jnp.tanh(product(w, x, waits))
            return jnp.mean(x**2) if last else x

        x = mpmd.named_computation(layer, name=f"stage{s}")(params[s], x, waits[0, s])
    return x


def step(params: Any, x: Any, waits: Any) -> Any:
    """One step of gradient descent."""
    loss, grads = mpmd.accumulate_gradients(loss_fn, MICROBATCHES)(params, x, waits)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments() -> tuple[Any, Any, Any]:
    """Parameters, a batch, and waits of nothing."""
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(STAGES)]
    x = rng.normal(size=(ROWS * MICROBATCHES, WIDTH)).astype(np.float32)
    return params, x, np.zeros((ROWS * MICROBATCHES, STAGES, 3), np.float32)


def lowered(donate: bool) -> Any:
    """The step, partitioned."""
    topology = mpmd.make_topology({f"m{s}": 1 for s in range(STAGES)})
    config = mpmd.make_config(topology, {f"stage{s}": f"m{s}" for s in range(STAGES)})
    return mpmd.jit(step, config, donate_argnums=0 if donate else ()).lower(*arguments())


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak(steps: int) -> dict[str, Any]:
    """Takes many steps; how memory, threads and files develop."""
    params, x, waits = arguments()
    compiled = lowered(donate=True).compile()
    every = max(1, steps // 40)
    samples = []
    for number in range(steps):
        params, loss = compiled(params, x, waits)
        if number % every == every - 1:
            jax.block_until_ready((params, loss))
            compiled.synchronize()
            samples.append((resident_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
    compiled.close()
    sizes, threads, files = (np.array(column) for column in zip(*samples))
    half = len(sizes) // 2
    slope = np.polyfit(np.arange(len(sizes) - half) * every, sizes[half:], 1)[0]
    return {
        "steps": steps,
        "bytes_per_step": round(float(slope), 1),
        "grown_bytes": int(sizes[-1] - sizes[half]),
        "threads_left": int(threads[-1] - threads[0]),
        "files_left": int(files[-1] - files[0]),
        "loss": float(loss),
    }


class Faults:
    """A step that is hurt again and again."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.params, self.x, self.waits = arguments()
        partitioned = lowered(donate=False)
        options = {
            "one thread": mpmd.RuntimeOptions(blocking=True),
            "a thread per mesh": mpmd.RuntimeOptions(issue="thread-per-mesh", blocking=True),
            "not waiting": mpmd.RuntimeOptions(),
        }
        self.compiled = {name: partitioned.compile(runtime=o) for name, o in options.items()}
        watching = mpmd.RuntimeOptions(debug_nans=True)
        self.nans = {"debug_nans": partitioned.compile(runtime=watching)}
        self.want = self._good(self.compiled["one thread"])

    def _good(self, compiled: Any) -> list[np.ndarray]:
        results = compiled(self.params, self.x, self.waits)
        compiled.synchronize()
        return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]

    def inject(self, kind: str) -> str:
        """One fault of a kind, then the same step without it; what was wrong, or nothing."""
        ways = self.nans if kind == "nan" else self.compiled
        way = list(ways)[self.rng.integers(len(ways))]
        stage, microbatch, direction = (int(self.rng.integers(n)) for n in (STAGES, MICROBATCHES, 2))
        waits = self.waits.copy()
        rows = slice(microbatch * ROWS, (microbatch + 1) * ROWS)
        waits[rows, stage, 2 if kind == "nan" else direction] = VALUES[kind]
        wrong = self._provoke(ways[way], kind, waits, stage, microbatch)
        again = self._good(ways[way])
        if not wrong and any(not np.array_equal(a, b) for a, b in zip(again, self.want)):
            wrong = "the next step gave something else"
        return f"{kind}, {way}, stage {stage}, microbatch {microbatch}: {wrong}" if wrong else ""

    def _provoke(self, compiled: Any, kind: str, waits: Any, stage: int, microbatch: int) -> str:
        """Runs a step that must fail; what was wrong about that, or nothing."""
        start = time.perf_counter()
        try:
            if kind == "interrupt":
                alarm = threading.Timer(INTERRUPT_AFTER_S, os.kill, (os.getpid(), signal.SIGINT))
                alarm.start()
            compiled(self.params, self.x, waits)
            compiled.synchronize()
        except KeyboardInterrupt:
            seconds = time.perf_counter() - start
            if kind != "interrupt":
                return "interrupted"
            return "" if seconds < INTERRUPT_WITHIN_S else f"interrupted after {seconds:.2f} s"
        except mpmd.errors.FragmentError as error:
            text = str(error)
            expected = f"on mesh 'm{stage}'", f"microbatch {microbatch},", CAUSES.get(kind, "?")
            missing = [part for part in expected if part not in text]
            return f"the error lacks {missing}: {text}" if missing else ""
        return "there was no error"

    def close(self) -> None:
        """Ends all threads."""
        for compiled in (*self.compiled.values(), *self.nans.values()):
            compiled.close()


def inject(count: int, seed: int = 0) -> dict[str, Any]:
    """Many faults; how many of each kind, and what went wrong."""
    before = threading.active_count()
    faults = Faults(seed)
    kinds = [KINDS[k % len(KINDS)] for k in range(count)]
    wrong = [problem for kind in kinds if (problem := faults.inject(kind))]
    faults.close()
    time.sleep(0.2)
    return {
        "faults": dict(Counter(kinds)),
        "wrong": wrong,
        "threads_left": threading.active_count() - before,
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=200)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", STAGES)
    result = {"soak": soak(args.steps), "faults": inject(args.faults)}
    for problem in result["faults"]["wrong"]:
        print(problem)
    print(json.dumps(result))


if __name__ == "__main__":
    script.run(main)
