"""Trains small models in one or several processes, and prints what came out: one JSON line for each case.

    python -m tests.support.training_in_processes MESHES STEPS MODEL:SCHEDULE[:BACKEND] ... [kill:PROCESS]

The same program runs in one process and, by `mpmd-run`, in several.  With `kill:PROCESS` this process ends
itself with SIGKILL after the last case, and the others take one more step; with `stop:PROCESS` SIGSTOP.
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
from examples.workloads.models import MODELS
from examples.workloads.steps import sgd_momentum, training_step
from tests.support.comparing import relative_difference, run_steps
from tests.support.scheduled_steps import jitted, placement

SHARDED: dict[str, list[Any]] = {
    "sharded": [2, 2],
    "sizes": [2, 1],
    "pair": [2],
    "whole": [4],
    "crossed": [slice(0, 4, 2), slice(1, 4, 2)],
    "inside": [slice(0, 3, 2), slice(1, 2)],
}
"""In place of a schedule: the devices of each mesh, over which the batch is sharded, or which devices."""


def sharded(step: Any, kind: str, arrays: int, backend: str) -> Any:
    """`step` on meshes of several devices, for a batch of so many arrays."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    meshes = [size if isinstance(size, int) else devices[size] for size in SHARDED[kind]]
    topology = mpmd.make_topology({f"m{m}": mesh for m, mesh in enumerate(meshes)})
    config = mpmd.make_config(
        topology,
        {f"stage{m}": f"m{m}" for m in range(len(meshes))},
        schedule="1f1b",
        backend=backend,
        in_shardings=(None, *[PartitionSpec("data")] * arrays),
    )
    return mpmd.jit(step, config, donate_argnums=0)


def train(case: str, meshes: int, steps: int, fault: str = "") -> dict[str, Any]:
    """Losses and a digest of the final state of one case.

    On sharded meshes of one process the difference to `jax.jit`, too.
    """
    name, schedule, backend = (*case.split(":"), "native")[:3]
    on = range(len(SHARDED[schedule])) if schedule in SHARDED else placement(schedule, meshes)
    params, loss, batch = MODELS[name].build(len(on))
    init, update = sgd_momentum()
    state = init(params)
    start = time.perf_counter()
    plain = training_step(loss, 4, update)
    if schedule in SHARDED:
        step = sharded(plain, schedule, len(batch), backend)
    else:
        step = jitted(plain, schedule, list(on))
    losses = []
    for _ in range(steps):
        state, value = step(state, *batch)
        losses.append(float(value).hex())
    fetched = jax.tree.leaves(mpmd.fetch(state))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in fetched)).hexdigest()[:16]
    found = {"case": case, "losses": losses, "state": digest}
    if schedule in SHARDED and jax.process_count() == 1:
        want, _ = run_steps(jax.jit(plain), init(params), [batch] * steps)
        found["difference"] = relative_difference(fetched, want)
    if fault:
        found |= after(fault, lambda: step(state, *batch))
    return found | {"seconds": round(time.perf_counter() - start, 2)}


def after(fault: str, step: Any) -> dict[str, Any]:
    """The error of a step during which a process is gone, and how long it took to be raised."""
    kind, _, process = fault.partition(":")
    if jax.process_index() == int(process):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    start = time.perf_counter()
    try:
        step()
    except mpmd.PeerError as error:
        return {"error": str(error), "after": time.perf_counter() - start}
    return {"error": "none"}


def main() -> None:
    warnings.filterwarnings("error", r"[\s\S]*please report this", UserWarning)
    meshes, steps, *cases = sys.argv[1:]
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", 2 * int(meshes))
    fault = cases.pop() if cases[-1].startswith(("kill:", "stop:")) else ""
    for number, case in enumerate(cases, 1):
        found = train(case, int(meshes), int(steps), fault if number == len(cases) else "")
        print(json.dumps({"process": jax.process_index(), **found}), flush=True)


if __name__ == "__main__":
    main()
