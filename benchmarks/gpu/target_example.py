"""Does the pipelined transformer train on meshes that share one GPU, by our own target, as `jax.jit` does?

Method: the example with two and with four stages, each on a mesh of the one device, `backend="native"`;
twenty steps from one state beside the same mathematics as one `jax.jit`, in full f32; then steps in turn for
time.

What the answer means: `difference` is the relative difference of the losses, and must be a rounding;
`step_ratio` (pipelined over plain) holds the cost of the pipeline and the speed of the target: see `example`
for the pipeline alone.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

from benchmarks.gpu.example import TINY, Runner
from benchmarks.gpu.experiment import Experiment, run_experiment

STEPS = 20
TINIER = {**TINY, "layers": 2, "seq_len": 8, "batch_size": 4, "num_microbatches": 2, "vocab_size": 256}


def measure(run: Experiment) -> None:
    """Finds it out."""
    import jax

    from benchmarks.gpu.target import libraries

    libraries(run.simulated)
    warnings.filterwarnings("ignore", "meshes .* share")
    for stages in (2, 4) if run.gpu else (2,):
        name = f"{stages} meshes"
        if run.has_time(name, 20):
            with run.part(name), jax.default_matmul_precision("highest"):
                train(run, name, {"num_stages": stages} if run.gpu else {**TINIER, "num_stages": stages})


def train(run: Experiment, name: str, fields: dict[str, Any]) -> None:
    """Both ways, beside each other."""
    import jax

    from benchmarks.gpu.example import steps_of
    from examples.pipelined_transformer.train_step import make_state

    config, pipelined, plain, batch = steps_of({**fields, "backend": "native"})
    first = jax.device_get(make_state(config))
    begin = time.perf_counter()
    compiled = pipelined.lower(first, batch).compile()
    run.figure(f"{name}.compile_s", time.perf_counter() - begin, "s")
    costs = compiled.cost_analysis()
    run.check(f"{name}: all fragments are ours", not costs["fallbacks"], f"{costs['fallbacks']:.0f} are not")
    ours, jit = Runner(compiled, first), Runner(plain, first)
    worst, count = 0.0, STEPS if run.gpu else 2
    for _ in range(count):
        for runner in (ours, jit):
            runner.take(batch, 1, timed=False)
        worst = max(worst, abs(float(ours.loss) - float(jit.loss)) / abs(float(jit.loss)))
    run.figure(f"{name}.difference", worst)
    run.check(f"{name}: {count} steps give the losses of jax.jit", worst < 2e-3, f"{worst:.1e}")
    for _ in range(5 if run.gpu else 1):
        for runner in (ours, jit):
            runner.take(batch, 10 if run.gpu else 1, timed=True)
    for which, runner in (("ours", ours), ("jit", jit)):
        run.figure(f"{name}.{which}_step_ms", 1e3 * statistics.median(runner.seconds), "ms")
    run.figure(f"{name}.step_ratio", statistics.median(ours.seconds) / statistics.median(jit.seconds))
    compiled.close()


if __name__ == "__main__":
    run_experiment("target_example", __doc__, measure)
