"""Trains a transformer on real text as a pipeline over several meshes.

    python -m examples.pipelined_transformer.main [--steps=400] [--num_stages=4] [--schedule=1f1b] ...
    mpmd-run -n 4 -m examples.pipelined_transformer.main ...

`--help` lists all flags.  The last line of the output is one JSON object with the figures of the run.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

import mpmd.flags  # noqa: F401 - defines --mpmd_... for every option of the library
from examples.pipelined_transformer import data, report, sample, several
from examples.pipelined_transformer.backends import step_seconds
from examples.pipelined_transformer.check import Check, CheckError
from examples.pipelined_transformer.checkpoint import Checkpoints
from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.train_step import make_state, make_train_step, whole_arrays
from mpmd.errors import CheckpointError, ConfigError, DataError, ScheduleError
from mpmd.scheduling.timeline import Timeline

_DEFINE = {
    "int": flags.DEFINE_integer,
    "float": flags.DEFINE_float,
    "bool": flags.DEFINE_bool,
    "str": flags.DEFINE_string,
}
# Options that may differ in a resumed run: how it is computed, and what it reports.
_NOT_FACTS = {
    "steps", "schedule", "num_stages", "stages", "devices_per_mesh", "backend", "data", "max_megabytes",
    "check", "check_steps", "compare_steps", "checkpoint_dir", "checkpoint_every", "resume", "output_dir",
    "sample_tokens",
}  # fmt: skip
INTERRUPTED = 130


class Interrupt:
    """Ctrl-C as a request: the current step is finished first.  A second one ends the run at once."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        together = jax.process_count() == 1  # several processes might not stop after the same step
        self._before = signal.signal(signal.SIGINT, self._note if together else signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        print("\nstopping after this step; press Ctrl-C again to stop at once", flush=True)


class TrainingRun:
    """One training run.

    Attributes:
        losses: of every step, those before a resume included.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.started = time.perf_counter()
        self.config = config
        self.folder = _writable(Path(config.output_dir))
        self.dataset = data.load(config.data, config.vocab_size, config.seq_len, config.max_megabytes << 20)
        print(f"{len(self.dataset.tokens):,} tokens of text from {self.dataset.source}")
        self.checkpoints = Checkpoints(
            Path(config.checkpoint_dir or self.folder / "checkpoints"), facts(config, self.dataset)
        )
        self.resumes = config.resume or self.checkpoints.of_this_start
        if self.resumes and self.checkpoints.newest() >= config.steps:
            raise ConfigError(
                f"the checkpoint is of step {self.checkpoints.newest()}, and --steps is {config.steps}\n"
                "  nothing is left to train: request more steps"
            )
        start = time.perf_counter()
        shapes = jax.eval_shape(functools.partial(make_state, config))
        self.compiled = make_train_step(config).lower(shapes, self.batch(0)).compile()
        self.compile_s = time.perf_counter() - start
        self.state, self.losses = self._first_state()
        size = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        print(
            f"{size:,} parameters in {config.num_stages} stages, {len(self.compiled.programs)} programs, "
            f"compiled in {self.compile_s:.1f} s"
        )
        at_first = jax.device_get(whole_arrays(self.state)) if config.check else None
        self.check = Check(config, at_first, self.batch(self.step)) if config.check else None
        self.compare_until = self.step + config.check_steps
        self.progress = report.Progress(config)

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return len(self.losses)

    def batch(self, step: int) -> Any:
        """The batch of a step: `i32[batch, seq + 1]`."""
        return self.dataset.batch(step, self.config.batch_size, self.config.seq_len, self.config.seed)

    def _first_state(self) -> tuple[Any, list[float]]:
        """What training begins with, each leaf on the mesh that uses it."""
        if not self.resumes:
            aside = self.checkpoints.set_aside()
            if aside:
                print(f"the checkpoints of the run before are now in {aside}")
            return self.compiled.arguments.init(functools.partial(make_state, self.config)), []
        state, losses = self.checkpoints.restore(self.compiled.arguments.abstract[0])
        print(f"resumed after step {len(losses)} from {self.checkpoints.directory}")
        return state, losses

    def train(self) -> Timeline | None:
        """Trains to the end, or until Ctrl-C; the timeline of the last step if one process took it."""
        every = self.config.checkpoint_every
        with Interrupt() as interrupt:
            while self.step < self.config.steps - 1:
                self._take_step()
                if interrupt.wanted or (every and self.step % every == 0):
                    self.checkpoints.save(self.step, self.state, self.losses)
                if interrupt.wanted:
                    return None
            timeline = self._take_step(charted=jax.process_count() == 1)
            self.checkpoints.save(self.step, self.state, self.losses)
        return timeline

    def _take_step(self, charted: bool = False) -> Timeline | None:
        """Takes one step and waits for its loss; what else it computes may overlap with the next."""
        batch, timeline = self.batch(self.step), None
        start = time.perf_counter()
        if charted:
            (self.state, loss), timeline = self.compiled.measure.timeline(self.state, batch)
        else:
            self.state, loss = self.compiled(self.state, batch)
        self.losses.append(float(loss))
        check = self.check if self.step <= self.compare_until else None
        if check:
            jax.block_until_ready(self.state)
        seconds = time.perf_counter() - start
        note = ""
        if check:
            difference = check.compare(self.step, batch, self.state, loss)
            note = f"{difference:.1e} from jax.jit"
        self.progress.step_done(self.step, self.losses[-1], seconds, note)
        return timeline

    def outcome(self, timeline: Timeline) -> report.Outcome:
        """The figures of a run that is done."""
        config, check = self.config, self.check
        step_s = statistics.median(self.progress.step_seconds)
        memory = self.compiled.memory_analysis()
        by_backend = step_seconds(config, self.state, self.batch(self.step))
        return report.Outcome(
            steps=self.step,
            loss_first=self.losses[0],
            loss_last=self.losses[-1],
            max_rel_diff=check.max_rel_diff if check else None,
            check_steps=len(check.seconds) if check else 0,
            bubble_measured=timeline.bubble_fraction(),
            bubble={mesh: timeline.bubble_fraction(mesh) for mesh in timeline.meshes},
            step_ms=1e3 * step_s,
            jit_step_ms=1e3 * statistics.median(check.seconds) if check else None,
            native_step_ms=1e3 * by_backend["native"] if by_backend else None,
            xla_step_ms=1e3 * by_backend["xla"] if by_backend else None,
            fallbacks=int(self.compiled.cost_analysis().get("fallbacks", 0)),
            tokens_per_s=config.tokens_per_step / step_s,
            peak_bytes={mesh: memory[mesh].peak_bytes for mesh in timeline.meshes},
            programs=len(self.compiled.programs),
            schedule=config.schedule,
            num_stages=config.num_stages,
            num_microbatches=config.num_microbatches,
            devices_per_mesh=config.devices_per_mesh,
            backend=", ".join(sorted({e.backend for e in self.compiled.executables.values()} - {"zeros"})),
            compile_s=self.compile_s,
            seconds=time.perf_counter() - self.started,
        )


def train(config: TrainConfig) -> report.Outcome | dict[str, Any] | None:
    """Trains, and prints and writes the report; None if it was interrupted."""
    config = several.adapted(config)
    run = TrainingRun(config)
    timeline = run.train()
    if run.step < config.steps:
        print(f"saved step {run.step} in {run.checkpoints.directory}; go on with --resume and the same flags")
        return None
    if timeline is None:
        return several.finish(run)
    text = sample.generate(
        config, jax.device_get(whole_arrays(run.state.params)), run.dataset.tokenizer, "def "
    )
    outcome = run.outcome(timeline)
    print(report.summary(outcome, timeline, text))
    for file in report.write_pictures(run.folder, run.losses, timeline):
        print(f"wrote {file}")
    print(outcome.to_json(), flush=True)
    run.compiled.close()
    return outcome


def config_from_flags() -> TrainConfig:
    """The flags as a record.

    Raises:
        ConfigError: they do not fit together.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    return TrainConfig(**{name: getattr(flags.FLAGS, name) for name in names})


def main(argv: list[str]) -> None:
    """Trains as the flags say; ends with 1 after an error that the user can mend, 130 after Ctrl-C."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected words: {' '.join(argv[1:])}; options begin with --")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        config = config_from_flags()
        if not jax.distributed.is_initialized():
            jax.config.update("jax_num_cpu_devices", config.num_stages * config.devices_per_mesh)
        outcome = train(config)
    except (ConfigError, ScheduleError, DataError, CheckpointError, CheckError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.exit(0 if outcome else INTERRUPTED)


def facts(config: TrainConfig, dataset: data.Dataset) -> dict[str, Any]:
    """What a checkpoint of this run belongs to."""
    facts = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_FACTS}
    return {**facts, "text": dataset.fingerprint}


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to --output_dir={folder}: {error.strerror}\n  give a folder that you may write to"
        ) from error
    return folder


def _define_flags() -> None:
    for field in dataclasses.fields(TrainConfig):
        _DEFINE[str(field.type)](field.name, field.default, field.metadata["help"])


if __name__ == "__main__":
    _define_flags()
    app.run(main)
