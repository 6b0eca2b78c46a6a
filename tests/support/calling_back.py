"""Two processes, one device each, whose fragments call Python functions that use JAX, on large arrays.

    NPROC=1 mpmd-run -n 2 -m tests.support.calling_back

One mesh for each process, then one over both.  With `NPROC=1` XLA has one thread in each process.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import mpmd

SIZE = 1200
"""JAX copies an array of SIZE x SIZE on a thread of the client, where XLA also computes its product."""


def on_host(x):
    return jnp.sin(np.asarray(x) / SIZE)


def stage(w, x):
    y = x @ w
    return y + jax.pure_callback(on_host, jax.ShapeDtypeStruct(y.shape, y.dtype), y)


def step(w, x):
    x = mpmd.named_computation(stage, name="first")(w, x)
    return mpmd.named_computation(stage, name="second")(w, x).sum()


def main() -> None:
    w = np.eye(SIZE, dtype=np.float32)
    x = np.linspace(0, 1, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    apart = mpmd.make_topology({"m0": 1, "m1": 1})
    together = mpmd.make_topology({"m": 2})
    rows = PartitionSpec(None, "data")
    configs = [
        mpmd.make_config(apart, {"first": "m0", "second": "m1"}),
        mpmd.make_config(together, {"first": "m", "second": "m"}, in_shardings=(None, rows)),
    ]
    for config in configs:
        jitted = mpmd.jit(step, config)
        found = [float(jitted(w, x)) for _ in range(3)]
        print(json.dumps({"process": jax.process_index(), "found": found}), flush=True)


if __name__ == "__main__":
    main()
