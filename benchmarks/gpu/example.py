"""How long is a step of the pipelined transformer on meshes that share one GPU, against `jax.jit`?

Method: the example's own step, every mesh on the one device, fragments compiled by XLA, and the same mathematics as
one `jax.jit`; first both from one state in full f32 precision for equality, then in turn for time.

What the answer means: on one device nothing can overlap, so `step_ratio` (pipelined over plain) is what the pipeline's
calls, copies and lost fusion cost; `issue_us_per_instruction` is the host's share of it.  The ratio should come near
1 as the model grows.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from typing import Any

from benchmarks.gpu.experiment import Experiment, run_experiment

SMALL = {"num_stages": 4, "backend": "xla"}
WIDE = {
    **SMALL, "layers": 12, "d_model": 768, "heads": 12, "seq_len": 512, "batch_size": 32, "num_microbatches": 8,
    "vocab_size": 8192, "dtype": "bfloat16",
}  # fmt: skip
TINY = {**SMALL, "layers": 4, "d_model": 32, "heads": 2, "seq_len": 16, "batch_size": 8, "num_microbatches": 4}


def measure(run: Experiment) -> None:
    """Finds it out."""
    import jax

    warnings.filterwarnings("ignore", "meshes .* share")
    with run.part("equality"), jax.default_matmul_precision("highest"):
        _equality(run, SMALL if run.gpu else TINY)
    for name, fields in ({"small": SMALL, "wide": WIDE} if run.gpu else {"tiny": TINY}).items():
        if run.has_time(name, 15):
            with run.part(name):
                _times(run, name, fields)


def _steps(fields: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """The configuration, both steps, and a batch."""
    import jax
    import numpy as np

    from examples.pipelined_transformer.config import TrainConfig
    from examples.pipelined_transformer.train_step import make_plain_step, make_train_step

    config = TrainConfig(**fields)
    if len(jax.devices()) != 1:
        raise RuntimeError(f"this experiment is about one device, and there are {len(jax.devices())}")
    rng = np.random.default_rng(0)
    batch = rng.integers(0, config.vocab_size, (config.batch_size, config.seq_len + 1)).astype(np.int32)
    return config, make_train_step(config), make_plain_step(config), jax.device_put(batch)


def _equality(run: Experiment, fields: dict[str, Any]) -> None:
    import jax
    import numpy as np

    from examples.pipelined_transformer.train_step import make_state

    config, pipelined, plain, batch = _steps(fields)
    first = jax.device_get(make_state(config))
    ours, wanted = first, first
    for _ in range(3):
        ours, our_loss = pipelined(ours, batch)
        wanted, loss = plain(wanted, batch)
    distance = max(
        float(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max())
        for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(wanted.params))
    )
    apart = abs(float(our_loss) - float(loss)) / abs(float(loss))
    run.figure("equality.loss", float(loss))
    run.figure("equality.largest_difference_of_parameters", distance)
    run.check("three steps give the loss of jax.jit", apart < 1e-4, f"relative difference {apart:.1e}")
    # Adam divides by the root of a tiny second moment: where a gradient is rounding noise, so is the step.
    run.check("three steps give the parameters of jax.jit", distance < 3 * config.learning_rate, f"{distance:.1e}")


@dataclasses.dataclass
class _Runner:
    """One way to take the step, with its state."""

    step: Any
    state: Any
    seconds: list[float] = dataclasses.field(default_factory=list)
    issue: list[float] = dataclasses.field(default_factory=list)
    loss: Any = None

    def take(self, batch: Any, count: int, timed: bool) -> None:
        import jax

        begin = time.perf_counter()
        for _ in range(count):
            self.state, self.loss = self.step(self.state, batch)
        issued = time.perf_counter() - begin
        jax.block_until_ready((self.state, self.loss))
        if timed:
            self.issue.append(issued / count)
            self.seconds.append((time.perf_counter() - begin) / count)


def _times(run: Experiment, name: str, fields: dict[str, Any]) -> None:
    import jax

    from examples.pipelined_transformer.train_step import make_state

    config, pipelined, plain, batch = _steps(fields)
    first = jax.device_get(make_state(config))
    begin = time.perf_counter()
    compiled = pipelined.lower(first, batch).compile()
    run.figure(f"{name}.compile_s", time.perf_counter() - begin, "s")
    instructions = sum(len(stream.instructions) for stream in compiled.program.streams)
    run.figure(f"{name}.instructions", instructions)
    run.figure(f"{name}.programs", len(compiled.programs))
    run.figure(f"{name}.parameters", sum(leaf.size for leaf in jax.tree.leaves(first.params)))
    runners = {"mpmd": _Runner(compiled, first), "jit": _Runner(plain, first)}
    begin = time.perf_counter()
    runners["jit"].take(batch, 1, timed=False)
    run.figure(f"{name}.jit_first_call_s", time.perf_counter() - begin, "s")
    runners["mpmd"].take(batch, 1, timed=False)
    for round_ in range(6 if run.gpu else 2):
        for runner in runners.values():
            runner.take(batch, 5 if run.gpu else 1, timed=round_ > 0)
        if run.seconds_left() < 5:
            break
    for which, runner in runners.items():
        run.figure(f"{name}.{which}_step_ms", 1e3 * statistics.median(runner.seconds), "ms")
        run.figure(f"{name}.{which}_issue_ms", 1e3 * statistics.median(runner.issue), "ms")
        run.figure(f"{name}.{which}_loss", float(runner.loss))
    ours, jit = runners["mpmd"], runners["jit"]
    run.figure(f"{name}.step_ratio", statistics.median(ours.seconds) / statistics.median(jit.seconds))
    per_instruction = 1e6 * statistics.median(ours.issue) / instructions
    run.figure(f"{name}.issue_us_per_instruction", per_instruction, "us")
    run.figure(f"{name}.tokens_per_s", config.tokens_per_step / statistics.median(ours.seconds))
    run.check(f"{name}: every fragment is compiled by XLA", _all_xla(compiled))
    apart = abs(float(ours.loss) - float(jit.loss)) / abs(float(jit.loss))
    run.check(f"{name}: the losses stay together", apart < 0.05, f"relative difference {apart:.1e}")
    compiled.close()


def _all_xla(compiled: Any) -> bool:
    return {executable.backend for executable in compiled.executables.values()} == {"xla"}


if __name__ == "__main__":
    run_experiment("example", __doc__, measure)
