"""How fast are GPT-2 124M's block and training step by our own target, against XLA?

Method: a block forward and backward in bf16, and the whole step with f32 master weights and Adam (batch 8,
1024 positions), each as one fragment by the target and as one `jax.jit`, both with donated state, in turn;
clocks before and after.

What the answer means: `speed` is XLA's time over ours.  `compile_s` is the first time, `compile_again_s` with
kernels and code from the cache on disk.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.experiment import Experiment, run_experiment
from benchmarks.gpu.programs import ComparedProgram, ModelSize, training_step

SMALL = ModelSize(batch=1, tokens=8, width=16, heads=2, layers=1, vocabulary=32)
CLOSE = {"block": 3e-2, "step": 1e-1}
"""The relative difference that rounding to bf16 makes; a second moment doubles its gradient's."""


def measure(run: Experiment) -> None:
    """Finds it out."""
    size = ModelSize() if run.gpu else SMALL
    with run.part("block"):
        from examples.workloads.fragments import cases

        name = "block forward+backward"
        function, arguments = next(c[1:] for c in cases(dataclasses.asdict(size), "bf16") if c[0] == name)
        compare(run, "block", function, arguments, 0)
    if run.has_time("step", 60 if run.gpu else 5):
        with run.part("step"):
            state, step = training(size)
            compare(run, "step", step.function, state, len(step.donated))


def training(size: ModelSize) -> tuple[list[Any], ComparedProgram]:
    """The arrays of a step (parameters, both moments, count; tokens, labels), and the step."""
    import numpy as np

    rng, program = np.random.default_rng(0), training_step(size)
    *state, _, tokens, labels = program.arguments
    count = len(state) // 3

    def weights(shape: tuple[int, ...]) -> np.ndarray:
        matrix = len(shape) > 1
        return (
            rng.standard_normal(shape, np.float32) * np.float32(0.02)
            if matrix
            else np.ones(shape, np.float32)
        )

    moments = [np.zeros(a.shape, np.float32) for a in state[count:]]
    words = [rng.integers(0, size.vocabulary, a.shape).astype(np.int32) for a in (tokens, labels)]
    return [*(weights(a.shape) for a in state[:count]), *moments, np.float32(0), *words], program


def compare(run: Experiment, name: str, function: Any, arguments: list[Any], donated: int) -> None:
    """Both compiled, equal, and timed in turn."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.gpu.target import chained, clocks, compiled, fragment_of
    from benchmarks.gpu.timing import interleaved
    from mpmd.compile.cache import DiskCache
    from mpmd.compile.options import CompileOptions

    fragment = fragment_of(name, function, arguments, range(donated))
    with tempfile.TemporaryDirectory() as folder:
        options = CompileOptions(cache=DiskCache(Path(folder)))
        for which in ("compile_s", "compile_again_s"):
            begin = time.perf_counter()
            made = compiled(run, fragment, options)
            run.figure(f"{name}.{which}", time.perf_counter() - begin, "s")
    program: Any = made.artefact.code
    run.figure(f"{name}.launches", len(list(program.program.launches())))
    run.figure(f"{name}.arena_bytes", made.workspace_bytes)
    begin = time.perf_counter()
    xla = jax.jit(function, donate_argnums=tuple(range(donated))).lower(*arguments).compile()
    run.figure(f"{name}.xla_compile_s", time.perf_counter() - begin, "s")
    run.figure(f"{name}.xla_temp_bytes", getattr(xla.memory_analysis(), "temp_size_in_bytes", None))

    def fresh() -> list[Any]:
        return [jnp.asarray(a) for a in arguments]

    found = [np.asarray(a, np.float32) for a in made(*fresh())]
    wanted = [np.asarray(a, np.float32) for a in jax.tree.leaves(xla(*fresh()))]
    apart = [float(np.linalg.norm(f - w) / max(1e-6, np.linalg.norm(w))) for f, w in zip(found, wanted)]
    run.figure(f"{name}.largest_relative_difference", max(apart))
    run.check(f"{name} equals jax.jit", max(apart) < CLOSE[name], f"{max(apart):.1e}")
    run.figure(f"{name}.clocks_before", clocks())
    rest = fresh()[donated:]
    calls = {
        "ours": chained(made, fresh()[:donated], rest),
        "xla": chained(lambda *a: jax.tree.leaves(xla(*a)), fresh()[:donated], rest),
    }
    times = interleaved(calls, rounds=5 if run.gpu else 1, seconds=0.5 if run.gpu else 0.0)
    run.figure(f"{name}.clocks_after", clocks())
    for which, taken in times.items():
        run.figure(f"{name}.{which}", taken.figures())
    run.figure(f"{name}.speed", times["xla"].median / times["ours"].median)


if __name__ == "__main__":
    run_experiment("target_gpt2", __doc__, measure)
