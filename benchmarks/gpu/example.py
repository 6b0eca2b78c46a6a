"""How long is a step of the pipelined transformer on meshes that share one GPU, against `jax.jit`?

Method: the example's own step, every mesh on the one device, fragments compiled by XLA, and the same
mathematics as one `jax.jit`; both take three steps from one state, which must agree, and then steps in turn
for time.  `small` is the example as it is, in full f32 precision; `wide` has the widths of GPT-2 small and
computes in bf16.

What the answer means: on one device nothing can overlap, so `step_ratio` (pipelined over plain) is the price
of the pipeline's calls, copies and lost fusion; `issue_us_per_instruction` is the host's share of it.  The
ratio should come near 1 as the model grows.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from typing import Any

from benchmarks.gpu import ahead
from benchmarks.gpu.experiment import COMPILED, Experiment, run_experiment

SMALL = {"num_stages": 4, "backend": "xla"}
WIDE = {
    **SMALL, "layers": 8, "d_model": 768, "heads": 12, "seq_len": 512, "batch_size": 32,
    "num_microbatches": 8, "vocab_size": 8192, "dtype": "bfloat16",
}  # fmt: skip
TINY = {
    **SMALL,
    "layers": 4,
    "d_model": 32,
    "heads": 2,
    "seq_len": 16,
    "batch_size": 8,
    "num_microbatches": 4,
}


def measure(run: Experiment) -> None:
    """Finds it out."""
    import jax

    warnings.filterwarnings("ignore", "meshes .* share")
    name, fields = ("small", SMALL) if run.gpu else ("tiny", TINY)
    with run.part(name), jax.default_matmul_precision("highest"):
        _compare(run, name, fields, exact=True)
    if not run.gpu:
        with run.part("ahead"):
            _ahead(run)
    elif run.has_time("wide", 40):
        with run.part("wide"):
            _compare(run, "wide", WIDE, exact=False)


def steps_of(fields: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
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


def _ahead(run: Experiment) -> None:
    """Some fragments of the step, compiled for a described GPU; all of them would take minutes."""
    if why := ahead.why_not():
        run.skip("XLA compiles fragments", why)
        return
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from examples.pipelined_transformer.train_step import make_state
    from mpmd.compile.backends.xla import XlaBackend

    config, pipelined, _, batch = steps_of(TINY)
    lowered = pipelined.lower(jax.eval_shape(lambda: make_state(config)), batch)
    mesh, backend = Mesh(np.array(ahead.devices()), ("data",)), XlaBackend()
    kernels = {
        name: ahead.kernel_count(backend.compile(lowered.fragments[name], mesh).compiled)
        for name in list(lowered.fragments)[1::7]
    }
    run.figure("ahead.kernels", kernels)
    note = f"{len(kernels)} of {len(lowered.fragments)}"
    run.check("XLA compiles fragments", all(kernels.values()), note, COMPILED)


@dataclasses.dataclass
class Runner:
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


def _compare(run: Experiment, name: str, fields: dict[str, Any], exact: bool) -> None:
    """Takes steps both ways: first a few for equality, then in turn for time."""
    import jax

    from examples.pipelined_transformer.train_step import make_state

    config, pipelined, plain, batch = steps_of(fields)
    first = jax.device_get(make_state(config))
    run.figure(f"{name}.parameters", sum(leaf.size for leaf in jax.tree.leaves(first.params)))
    begin = time.perf_counter()
    compiled = pipelined.lower(first, batch).compile()
    run.figure(f"{name}.compile_s", time.perf_counter() - begin, "s")
    instructions = sum(len(stream.instructions) for stream in compiled.program.streams)
    run.figure(f"{name}.instructions", instructions)
    run.figure(f"{name}.programs", len(compiled.programs))
    by_xla = {executable.backend for executable in compiled.executables.values()} == {"xla"}
    run.check(f"{name}: every fragment is compiled by XLA", by_xla)
    ours, jit = Runner(compiled, first), Runner(plain, first)
    begin = time.perf_counter()
    jit.take(batch, 1, timed=False)
    run.figure(f"{name}.jit_first_call_s", time.perf_counter() - begin, "s")
    ours.take(batch, 1, timed=False)
    for runner in (ours, jit):
        runner.take(batch, 2, timed=False)
    _equal(run, name, config, ours, jit, exact)
    for _ in range(5 if run.gpu else 2):
        for runner in (ours, jit):
            runner.take(batch, 5 if run.gpu else 1, timed=True)
        if run.seconds_left() < 5:
            break
    for which, runner in (("mpmd", ours), ("jit", jit)):
        run.figure(f"{name}.{which}_step_ms", 1e3 * statistics.median(runner.seconds), "ms")
        run.figure(f"{name}.{which}_issue_ms", 1e3 * statistics.median(runner.issue), "ms")
        run.figure(f"{name}.{which}_loss", float(runner.loss))
    run.figure(f"{name}.step_ratio", statistics.median(ours.seconds) / statistics.median(jit.seconds))
    per_instruction = 1e6 * statistics.median(ours.issue) / instructions
    run.figure(f"{name}.issue_us_per_instruction", per_instruction, "us")
    run.figure(f"{name}.tokens_per_s", config.tokens_per_step / statistics.median(ours.seconds))
    compiled.close()


def _equal(run: Experiment, name: str, config: Any, ours: Runner, jit: Runner, exact: bool) -> None:
    """After three steps from one state."""
    import jax
    import numpy as np

    apart = abs(float(ours.loss) - float(jit.loss)) / abs(float(jit.loss))
    limit = 1e-4 if exact else 2e-2
    run.check(
        f"{name}: three steps give the loss of jax.jit", apart < limit, f"relative difference {apart:.1e}"
    )
    distance = max(
        float(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max())
        for a, b in zip(jax.tree.leaves(ours.state.params), jax.tree.leaves(jit.state.params))
    )
    run.figure(f"{name}.largest_difference_of_parameters", distance)
    if exact:
        # Adam divides by the root of a tiny second moment: where a gradient is rounding noise, so is the
        # step.
        close = distance < 3 * config.learning_rate
        run.check(f"{name}: three steps give the parameters of jax.jit", close, f"{distance:.1e}")


if __name__ == "__main__":
    run_experiment("example", __doc__, measure)
