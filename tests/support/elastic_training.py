"""Trains in as many processes as there are, from the newest checkpoint; with four of them one is lost.

    mpmd-run -n 4 --min-processes 2 -m tests.support.elastic_training FOLDER LOST...

Each number of processes gets a plan of its own: `mpmd.plan` chooses stages and schedule.  With as many
processes as one of the numbers LOST, the last process kills itself after its second step.  Process 0 prints
one JSON line when all steps are done.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import jax
import numpy as np

import mpmd
from tests.support.stacked_training import ROWS, WIDTH, init, loss

STEPS = 6


def step(state, x, y, *, num_microbatches=2):
    value, grads = mpmd.accumulate_gradients(loss, num_microbatches)(state["params"], x, y)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momenta)
    return {**state, "params": params, "momenta": momenta, "step": state["step"] + 1}, value


def batch_of(number):
    return np.random.default_rng(number).normal(size=(2, ROWS, WIDTH)).astype(np.float32)


def main(folder: str, lost: set[int]) -> None:
    count, key = jax.process_count(), jax.random.key(7)
    shapes = jax.eval_shape(init, key)
    plan = mpmd.plan(
        step, shapes, *batch_of(0), devices=count, microbatches=(2,), schedules=("1f1b",), partition=0
    )
    compiled = mpmd.jit(plan.step, plan.config, donate_argnums=0).compiled(shapes, *batch_of(0))
    losses: list[str] = []
    counts: list[int] = []
    if mpmd.checkpoint.steps(folder):
        _, state, extra = mpmd.checkpoint.restore(folder, compiled.arguments.abstract[0])
        losses, counts = extra["losses"], extra["counts"]
    else:
        state = compiled.arguments.init(init, key)
    for number in range(len(losses), STEPS):
        state, value = compiled(state, *batch_of(number))
        losses, counts = [*losses, float(value).hex()], [*counts, count]
        if len(counts) - counts.index(count) == 2 and count in lost and jax.process_index() == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mpmd.checkpoint.save(folder, number + 1, state, {"losses": losses, "counts": counts})
    if jax.process_index() == 0:
        print(json.dumps({"losses": losses, "counts": counts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], {int(count) for count in sys.argv[2:]})
