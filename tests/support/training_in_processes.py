"""Trains small models in one or several processes, and prints what came out: one JSON line for each case.

    python -m tests.support.training_in_processes MESHES STEPS MODEL:SCHEDULE ... [kill:PROCESS]

The same program runs in one process and, by `mpmd-run`, in several.  With `kill:PROCESS` this process ends
itself with SIGKILL after the last case, and the others take one more step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import mpmd
from benchmarks.script import COMPILER_FAULT
from tests.support.comparing import sgd_momentum, training_step
from tests.support.models import MODELS
from tests.support.scheduled_steps import jitted, placement

SIZES = {"sharded": (2, 2), "sizes": (2, 1)}
"""In place of a schedule: the devices of each mesh, over which the batch is sharded."""


def sharded(step: Any, kind: str) -> Any:
    """`step` on two meshes of several devices."""
    topology = mpmd.make_topology({f"m{m}": {"data": size} for m, size in enumerate(SIZES[kind])})
    config = mpmd.make_config(
        topology,
        {"stage0": "m0", "stage1": "m1"},
        schedule="1f1b",
        in_shardings=(None, PartitionSpec("data"), PartitionSpec("data")),
    )
    return mpmd.jit(step, config, donate_argnums=0)


def train(case: str, meshes: int, steps: int, kill: int = -1) -> dict[str, Any]:
    """Losses and a digest of the final state of one case."""
    name, _, schedule = case.partition(":")
    on = [0, 1] if schedule in SIZES else placement(schedule, meshes)
    params, loss, batch = MODELS[name].build(len(on))
    init, update = sgd_momentum()
    state = init(params)
    start = time.perf_counter()
    step = training_step(loss, 4, update)
    step = sharded(step, schedule) if schedule in SIZES else jitted(step, schedule, on)
    losses = []
    for _ in range(steps):
        state, value = step(state, *batch)
        losses.append(float(value).hex())
    fetched = jax.tree.leaves(mpmd.fetch(state))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in fetched)).hexdigest()[:16]
    found = {"case": case, "losses": losses, "state": digest}
    if kill >= 0:
        found |= after_a_kill(lambda: step(state, *batch), kill)
    return found | {"seconds": round(time.perf_counter() - start, 2)}


def after_a_kill(step: Any, process: int) -> dict[str, Any]:
    """The error of a step during which a process is gone, and how long it took to be raised."""
    if jax.process_index() == process:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.perf_counter()
    try:
        step()
    except mpmd.PeerError as error:
        return {"error": str(error), "after": time.perf_counter() - start}
    return {"error": "none"}


def main() -> None:
    warnings.filterwarnings("error", COMPILER_FAULT, UserWarning)
    meshes, steps, *cases = sys.argv[1:]
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", 2 * int(meshes))
    kill = int(cases.pop().partition(":")[2]) if cases[-1].startswith("kill:") else -1
    for number, case in enumerate(cases, 1):
        found = train(case, int(meshes), int(steps), kill if number == len(cases) else -1)
        print(json.dumps({"process": jax.process_index(), **found}), flush=True)


if __name__ == "__main__":
    main()
