"""The same step by each compile backend, one after the other: how long it takes natively and by XLA."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
from flax.training.train_state import TrainState

from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.train_step import make_train_step

BACKENDS = ("native", "xla")


def step_seconds(config: TrainConfig, state: TrainState, batch: np.ndarray) -> dict[str, float]:
    """Backend -> median seconds of a step.

    Both take a step that does not count, then `config.compare_steps` in turn, so that whatever else the
    machine does slows both.  Nothing is found with no steps.

    Args:
        config: of the run.
        state: what both start from.
        batch: `i32[batch, seq + 1]`, the same for all steps.
    """
    if not config.compare_steps:
        return {}
    start = jax.device_get(state)
    steps: dict[str, Any] = {
        name: make_train_step(dataclasses.replace(config, backend=name)).lower(start, batch).compile()
        for name in BACKENDS
    }
    states = dict.fromkeys(BACKENDS, start)
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for _ in range(1 + config.compare_steps):
        for name, step in steps.items():
            begun = time.perf_counter()
            states[name], loss = step(states[name], batch)
            jax.block_until_ready((states[name], loss))
            seconds[name].append(time.perf_counter() - begun)
    for step in steps.values():
        step.close()
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
