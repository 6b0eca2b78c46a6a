"""Does GPT-2's training step, by our target, give on this GPU what `jax.jit` gives?

Method: the step of two layers in bf16 with f32 master weights and Adam, prepared, and XLA's, which compiles
here in seconds; the same state for both.  Ours twice, and captured as a graph.

What the answer means: `largest_relative_difference` is a rounding to bf16, or something is wrong; a
second moment doubles its gradient's.  `run_to_run` is what sums in any order differ by.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.experiment import Experiment, run_experiment
from benchmarks.gpu.programs import SMALL, ModelSize, step_arguments, step_sizes, training_step
from benchmarks.gpu.target import loaded
from mpmd.compile.options import CompileOptions

NAME, CLOSE = "step_of_two_layers", 1e-1


def measure(run: Experiment) -> None:
    """Finds it out."""
    size = step_sizes(ModelSize() if run.gpu else SMALL)[NAME]
    step, arguments = training_step(size), step_arguments(size)
    begin = time.perf_counter()
    program = jax.jit(step.function, donate_argnums=step.donated).lower(*arguments).compile()
    run.figure("xla_compile_s", time.perf_counter() - begin, "s")

    def results(call: Any) -> list[np.ndarray]:
        return [np.asarray(a, np.float32) for a in jax.tree.leaves(call(*map(jnp.asarray, arguments)))]

    wanted = results(program)
    begin = time.perf_counter()
    made = loaded(run, NAME)
    run.figure("load_s", time.perf_counter() - begin, "s")
    found = results(made)
    worst = largest_difference(found, wanted)
    run.figure("largest_relative_difference", worst)
    run.check("the step equals jax.jit", worst < CLOSE, f"{worst:.1e}")
    run.figure("loss", {"ours": float(found[-1]), "xla": float(wanted[-1])})
    run.figure("run_to_run", largest_difference(results(made), found))
    with run.part("captured"):
        graph = loaded(run, NAME, CompileOptions(command_buffers=True))
        worst = max(largest_difference(results(graph), wanted) for _ in range(3))
        run.check("the captured step equals jax.jit", worst < CLOSE, f"{worst:.1e}")


def largest_difference(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest relative difference of norms; NaN is infinite."""
    apart = [float(np.linalg.norm(f - w) / max(1e-6, np.linalg.norm(w))) for f, w in zip(found, wanted)]
    return max(a if a == a else float("inf") for a in apart)


if __name__ == "__main__":
    run_experiment("step_right", __doc__, measure)
