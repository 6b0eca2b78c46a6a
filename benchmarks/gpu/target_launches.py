"""What does a launch cost by our handler, with and without a CUDA graph, and is the graph right?

Method: thirty times tanh of a small product, sixty launches, each of them needing the last; by the target as
it is and with `--mpmd_command_buffers`, and by XLA with and without its own graphs, in turn.  Then the graph
gets arguments at other addresses in each call.

What the answer means: `us_per_launch` is the time of the program over its launches: below some microseconds
it is the launch and not the kernel.  If `captured` is clearly below `plain` and everything is right, command
buffers can be on by default.  `XLA counts the executables` must hold, or programs must never be unloaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu.experiment import Experiment, run_experiment

COUNT, WIDTH = 30, 64
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 20}


def chain(x: Any, w: Any) -> Any:
    """Sixty launches."""
    import jax.numpy as jnp

    for _ in range(COUNT):
        x = jnp.tanh(x @ w)
    return x


def measure(run: Experiment) -> None:
    """Finds it out."""
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.target import compiled, fragment_of
    from benchmarks.gpu.timing import interleaved
    from mpmd.compile.options import CompileOptions

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((2, WIDTH, WIDTH)) / 8).astype(np.float32)
    with jax.default_matmul_precision("highest"):  # of all that are compared
        fragment = fragment_of("chain", chain, [x, w])
        xla = jax.jit(chain).lower(x, w)
        wanted = np.asarray(jax.jit(chain)(x, w))
    calls: dict[str, Any] = {}
    for name, captured in (("plain", False), ("captured", True)):
        with run.part(name):
            made = compiled(run, fragment, CompileOptions(command_buffers=captured))
            calls[name] = made
            code: Any = made.artefact.code
            launches = len(list(code.program.launches()))
            run.figure(f"launches.{name}", launches)
            for _ in range(3):
                apart = float(np.abs(np.asarray(made(jnp.asarray(x), jnp.asarray(w))[0]) - wanted).max())
            run.check(f"{name} is right", apart < 1e-4, f"{apart:.1e}")
    with run.part("addresses change"):
        _addresses_change(run, calls["captured"], w)
    with run.part("executables are counted"):
        _counted(run, calls["plain"])
    for name, options in (("xla", {}), ("xla_without_graphs", NO_GRAPHS if run.gpu else {})):
        with run.part(name):
            program = xla.compile(compiler_options=options or None)
            calls[name] = lambda x, w, program=program: [program(x, w)]
    given = jnp.asarray(x), jnp.asarray(w)
    seconds = 0.05 if run.gpu else 0.0
    rounds = 5 if run.gpu else 1
    times = interleaved(
        {n: (lambda f=f: f(*given)) for n, f in calls.items()}, rounds=rounds, seconds=seconds
    )
    for name, taken in times.items():
        run.figure(f"times.{name}", taken.figures())
        run.figure(f"us_per_launch.{name}", 1e6 * taken.median / (2 * COUNT), "us")


def _addresses_change(run: Experiment, call: Any, w: np.ndarray) -> None:
    """Calls with other arrays, all kept, so that no address comes again; three times with each."""
    import jax
    import jax.numpy as jnp

    kept, worst = [], 0.0
    for seed in range(12 if run.gpu else 2):  # a program has eight graphs
        x = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8
        arrays = jnp.asarray(x), jnp.asarray(w + 0)
        with jax.default_matmul_precision("highest"):
            wanted = np.asarray(chain(*arrays))
        for _ in range(3):
            found = call(*arrays)
            worst = max(worst, float(np.abs(np.asarray(found[0]) - wanted).max()))
            kept.append((arrays, found))
    run.check("right after addresses change", worst < 1e-4, f"largest difference {worst:.1e}")


def _counted(run: Experiment, made: Any) -> None:
    from benchmarks.gpu.target import libraries
    from mpmd.compile.backends.ffi.custom_call import is_called

    counted = is_called(made.program.index, libraries(run.simulated).platform)
    run.check("XLA counts the executables of a program", counted)


if __name__ == "__main__":
    run_experiment("target_launches", __doc__, measure)
