"""A run in several processes, as `mpmd-run` starts them: what it leaves out, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import jax

import mpmd
from examples.pipelined_transformer import report, sample
from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.train_step import whole_arrays

if TYPE_CHECKING:
    from examples.pipelined_transformer.main import TrainingRun


def adapted(config: TrainConfig) -> TrainConfig:
    """The configuration without what needs the whole state in one process; only process 0 prints.

    Call it once, before anything is printed.
    """
    if jax.process_count() == 1:
        return config
    if jax.process_index():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if config.check or config.compare_steps:
        print("not compared with plain jax.jit, and backends not timed: both need the state in one process")
    return dataclasses.replace(config, check=False, compare_steps=0)


def finish(run: TrainingRun) -> dict[str, Any]:
    """Prints the end of a run; the figures of its last line."""
    config = run.config
    # The sample needs the whole model: this one is small enough for every process.
    params = jax.device_get(whole_arrays(mpmd.fetch(run.state.params)))
    step_s = statistics.median(run.progress.step_seconds)
    print(f"The model writes:\n\n{sample.generate(config, params, run.dataset.tokenizer, 'def ')}\n")
    if jax.process_index() == 0:
        print(f"wrote {report.write_losses(run.folder, run.losses)}")
    figures = {
        "steps": run.step,
        "loss_first": run.losses[0],
        "loss_last": run.losses[-1],
        "step_ms": round(1e3 * step_s, 1),
        "tokens_per_s": round(config.tokens_per_step / step_s),
        "processes": jax.process_count(),
        "schedule": config.schedule,
        "num_stages": config.num_stages,
        "compile_s": round(run.compile_s, 1),
        "seconds": round(time.perf_counter() - run.started, 1),
    }
    print(json.dumps(figures), flush=True)
    run.compiled.close()
    return figures
