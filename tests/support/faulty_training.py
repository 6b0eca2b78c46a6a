"""Trains in several processes until a fault occurs in one of them; the others print what they raise.

    python -m tests.support.faulty_training KIND PROCESS STEP FILE

`KIND` is `kill`, `stop`, `fragment`, `script`, `exit`, `program` or `none`.  The time of the fault is written
to `FILE`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import mpmd
from examples.workloads.models import chain, dense, dense_params, regression_batch
from mpmd.errors import AbsentValueError

STEPS = 4
now = {"step": 0}


def inject(kind: str, path: Path) -> None:
    path.write_text(str(time.time()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "exit":
        sys.exit(0)
    else:
        raise ValueError(f"the fault of a {kind}")


def main(kind: str, process: int, at: int, path: Path) -> None:
    count = jax.process_count()

    def check(x):
        if kind in ("kill", "stop", "fragment") and jax.process_index() == process and now["step"] == at:
            inject(kind, path)
        return np.asarray(x)

    @jax.custom_vjp
    def checked(x):
        return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    checked.defvjp(lambda x: (checked(x), None), lambda _, g: (g,))
    loss = chain(count, lambda p, x: dense(p, checked(x)))
    rate = 0.25 if kind == "program" and jax.process_index() == process else 0.125

    def step(params, x, y):
        value, grads = mpmd.accumulate_gradients(loss, 4)(params, x, y)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    topology = mpmd.make_topology({f"m{m}": 1 for m in range(count)})
    config = mpmd.make_config(topology, {f"stage{s}": f"m{s}" for s in range(count)}, schedule="1f1b")
    jitted = mpmd.jit(step, config, donate_argnums=0)
    params = {f"s{s}": dense_params(s) for s in range(count)}
    if kind == "program":
        path.write_text(str(time.time()))
    for number in range(STEPS):
        now["step"] = number
        if kind in ("script", "exit") and jax.process_index() == process and number == at:
            inject(kind, path)
        params, value = jitted(params, *regression_batch())
        float(value)
    read(params, process)


def read(params, process):
    """Every process reads the parameters of one: the others cannot, until they are fetched."""
    weights = params[f"s{process}"]["w"]
    if jax.process_index() != process:
        with pytest.raises(AbsentValueError) as raised:
            np.asarray(weights)
        assert str(weights.shape[0]) in repr(weights)
        print(json.dumps({"process": jax.process_index(), "text": str(raised.value)}), flush=True)
    fetched = np.asarray(mpmd.fetch(weights))
    print(json.dumps({"process": jax.process_index(), "sum": float(fetched.sum())}), flush=True)


if __name__ == "__main__":
    kind, process, at, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    warnings.filterwarnings("error", r"[\s\S]*please report this", UserWarning)
    try:
        main(kind, process, at, path)
    except Exception as error:
        seconds = round(time.time() - float(path.read_text()), 2)
        found = {"process": jax.process_index(), "error": type(error).__name__, "seconds": seconds}
        print(json.dumps({**found, "text": str(error)}), flush=True)
        raise
