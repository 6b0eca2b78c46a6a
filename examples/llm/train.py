"""Trains a language model as a pipeline, from the first step to the checkpoint after the crash.

    python -m examples.llm.train [--plan=auto] [--steps=200] [--layers=8] ...
    mpmd-run -n 4 -m examples.llm.train ...

The same command goes on from the newest checkpoint in `--out`.  `--help` lists all flags.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from jax.sharding import PartitionSpec

import mpmd
import mpmd.flags
from examples.llm.data import FINGERPRINT, VOCAB, Batches, documents, packed
from examples.llm.model import Llama
from mpmd.errors import CheckpointError, ConfigError


def _flag(default: Any, help_text: str, fact: bool = True) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, "fact": fact})


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run; each field is a flag.  Facts are what a run that goes on must share."""

    steps: int = _flag(200, "train until this step; the learning rate decays until there")
    batch: int = _flag(16, "rows of a step, over all microbatches")
    length: int = _flag(128, "tokens of a row")
    layers: int = _flag(8, "layers, in one scan")
    width: int = _flag(128, "width of the model")
    heads: int = _flag(8, "heads of queries")
    kv_heads: int = _flag(2, "heads of keys and values")
    hidden: int = _flag(352, "width of the multilayer perceptron")
    dtype: str = _flag("bfloat16", "what layers compute in; parameters and moments are f32")
    learning_rate: float = _flag(3e-3, "the highest, after the warm-up")
    warmup: int = _flag(20, "steps of the warm-up")
    clip: float = _flag(1.0, "global norm to which gradients are scaled down")
    seed: int = _flag(0, "of parameters and batches")
    plan: str = _flag("", "auto: let mpmd.plan choose meshes, stages, schedule and microbatches", False)
    meshes: int = _flag(0, "without a plan: meshes that share the devices; 0 for one each", False)
    microbatches: int = _flag(8, "without a plan: microbatches of a step", False)
    schedule: str = _flag("1f1b", "without a plan: the order of tasks", False)
    devices: int = _flag(4, "virtual CPU devices, in one process", False)
    log_every: int = _flag(10, "steps between lines of metrics; 0 for none", False)
    evaluate_every: int = _flag(50, "steps between evaluations; 0 for none", False)
    checkpoint_every: int = _flag(50, "steps between checkpoints; 0 for none", False)
    out: str = _flag("out/llm", "where checkpoints and metrics go", False)
    tensorboard: bool = _flag(False, "write metrics for TensorBoard, too", False)

    @property
    def model(self) -> Llama:
        return Llama(VOCAB, self.width, self.layers, self.heads, self.kv_heads, self.hidden, self.dtype)

    @property
    def facts(self) -> dict[str, Any]:
        fields = [field.name for field in dataclasses.fields(self) if field.metadata["fact"]]
        return {"text": FINGERPRINT, **{name: getattr(self, name) for name in fields}}

    def every(self, steps: int) -> set[int]:
        """After which steps something is done: every so many and at the end, or never."""
        return {*range(steps, self.steps, steps), self.steps} if steps else set()


def make_optimizer(job: Job) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW behind clipping, and its learning rate: a warm-up, and a cosine down to a tenth."""
    peak, steps = job.learning_rate, max(job.steps, job.warmup + 1)
    rate = optax.warmup_cosine_decay_schedule(peak / (job.warmup + 1), peak, job.warmup, steps, peak / 10)
    decayed = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: "norm" not in str(path))
    adam = optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(job.clip), adam), rate


def make_step(job: Job) -> Callable[..., Any]:
    """The step: under `jax.jit` on one device, under `mpmd.jit` a pipeline."""
    optimizer, _ = make_optimizer(job)

    def step(state: Any, batch: Any, *, num_microbatches: int) -> Any:
        of_loss = mpmd.accumulate_gradients(job.model.loss, num_microbatches, weighted=True)
        loss, grads = of_loss(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, {"loss": loss, "norm": optax.tree.norm(grads)}

    return step


def make_evaluation(job: Job, num_microbatches: int) -> Callable[..., Any]:
    """The loss of a batch of held-out text, forward alone: its sum, and how many tokens count."""

    def evaluate(params: Any, batch: Any) -> Any:
        def add(sums: Any, rows: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, mpmd.staged(job.model.loss)(params, rows)), None

        zeros = jnp.float32(0), jnp.int32(0)
        return mpmd.microbatch_loop(add, zeros, batch, num_microbatches=num_microbatches)[0]

    return evaluate


def init(job: Job) -> Any:
    params = job.model.init(jax.random.key(job.seed))
    return {"params": params, "moments": make_optimizer(job)[0].init(params)}


def choose(job: Job, state: Any, batch: Any) -> tuple[int, mpmd.Config]:
    """How many microbatches, and what runs where: as planned, or as the flags say with stages by cost."""
    rows = None, PartitionSpec("data")
    if job.plan == "auto":
        where = {"devices": jax.device_count(), "in_shardings": rows}
        counts = [n for n in (2, 4, 8, 16, 32) if job.batch % n == 0]
        plan = mpmd.plan(make_step(job), state, batch, microbatches=counts, **where)
        if jax.process_index() == 0:
            print(plan)
        return plan.best.choice.microbatches, plan.config
    if job.plan:
        raise ConfigError(f"--plan is {job.plan!r}\n  use auto, or leave it out")
    count = job.meshes or jax.device_count()
    topology = mpmd.make_topology({f"m{k}": jax.device_count() // count for k in range(count)})
    config = mpmd.make_config(topology, stages="auto", schedule=job.schedule, in_shardings=rows)
    return job.microbatches, config


class Metrics:
    """Scalars, written by process 0: printed, to `metrics.jsonl`, and for TensorBoard if that is wanted."""

    def __init__(self, job: Job) -> None:
        self._writes, self._folder, self._board = jax.process_index() == 0, Path(job.out), None
        if self._writes and job.tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise ConfigError("--tensorboard needs a package: pip install tensorboardX") from error
            self._board = SummaryWriter(job.out)

    def write(self, step: int, **scalars: float) -> None:
        if self._writes:
            print(f"step {step}: " + ", ".join(f"{k} {v:.6g}" for k, v in scalars.items()), flush=True)
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, **scalars}) + "\n")
            for name, value in scalars.items() if self._board else ():
                self._board.add_scalar(name, value, step)


def first_state(job: Job, compiled: Any) -> tuple[int, Any]:
    """The step to begin with, and its state: of the newest checkpoint, or fresh; each leaf on its mesh."""
    folder = Path(job.out) / "checkpoints"
    if not mpmd.checkpoint.steps(folder):
        return 0, compiled.arguments.init(functools.partial(init, job))
    saved, here = mpmd.checkpoint.extra(folder), job.facts
    differ = [f"{k} is {saved.get(k)!r} there, {here[k]!r} here" for k in here if saved.get(k) != here[k]]
    if differ:
        raise CheckpointError(f"{folder} is of another run: {', '.join(differ)}\n  use another --out")
    restored = mpmd.checkpoint.restore(folder, compiled.arguments.abstract[0])
    return restored.step, restored.state


def train(job: Job) -> Any:
    """Trains to the last step; the state after it."""
    metrics, (_, rate) = Metrics(job), make_optimizer(job)
    batches = Batches(packed(documents(held_out=False), job.length), job.batch, job.steps, job.seed)
    rows = packed(documents(held_out=True), job.length)
    held_out = Batches(rows, job.batch, max(1, len(rows["ids"]) // job.batch))
    state = jax.eval_shape(functools.partial(init, job))
    count, config = choose(job, state, batches[0])
    step_fn = functools.partial(make_step(job), num_microbatches=count)
    compiled = mpmd.jit(step_fn, config, donate_argnums=0).compiled(state, batches[0])
    evaluate = mpmd.jit(make_evaluation(job, count), dataclasses.replace(config, schedule="forward_only"))
    log, evaluations, checkpoints = map(job.every, (job.log_every, job.evaluate_every, job.checkpoint_every))
    (first, state), start = first_state(job, compiled), time.perf_counter()
    for step, batch in enumerate(batches.iterate(first), first + 1):
        state, scalars = compiled(state, batch)
        if step in log:
            values = {name: float(value) for name, value in scalars.items()}  # waits for the step
            metrics.write(step, **values, rate=float(rate(step - 1)), seconds=time.perf_counter() - start)
        if step in evaluations:
            sums = [jax.device_get(evaluate(state["params"], of)) for of in held_out.iterate(0)]
            total, tokens = np.sum(sums, axis=0)
            metrics.write(step, held_out_loss=float(total / tokens))
        if step in checkpoints:
            mpmd.checkpoint.save(Path(job.out) / "checkpoints", step, state, job.facts)
    return state


def main(argv: list[str]) -> None:
    """Trains as the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected words: {' '.join(argv[1:])}; options begin with --")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    job = Job(**{field.name: getattr(flags.FLAGS, field.name) for field in dataclasses.fields(Job)})
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", job.devices)
    try:
        train(job)
    except mpmd.errors.MpmdError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    define = {int: flags.DEFINE_integer, float: flags.DEFINE_float, bool: flags.DEFINE_bool}
    for field in dataclasses.fields(Job):
        of_kind = define.get(type(field.default), flags.DEFINE_string)
        of_kind(field.name, field.default, field.metadata["help"])
    app.run(main)
