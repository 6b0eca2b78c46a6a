"""Prints the share of a process of a state, and how much memory it took at most while it was created, in MiB.

python -m tests.support.initial_peak
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

LAYERS, WIDTH = 4, 2048


def init(key):
    keys = jax.random.split(key, LAYERS)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 32 for k in keys]
    return {"params": params, "moments": jax.tree.map(jnp.zeros_like, params)}


def step(state, x):
    def loss(params):
        h = x
        for number, w in enumerate(params):
            h = mpmd.named_computation(lambda w, h: jnp.tanh(h @ w), name=f"layer{number}")(w, h)
        return jnp.mean(h)

    grads = jax.grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    return {"params": jax.tree.map(lambda p, m: p - m, state["params"], moments), "moments": moments}


def mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def main() -> None:
    key = jax.random.key(0)
    config = mpmd.make_config(mpmd.make_topology({"m": 1}), {f"layer{k}": "m" for k in range(LAYERS)})
    jitted = mpmd.jit(step, config)
    compiled = jitted.compiled(jax.eval_shape(init, key), np.ones((8, WIDTH), np.float32))
    jax.block_until_ready(jax.jit(lambda k: jax.random.normal(k, (16,)))(key))  # XLA's compiler is loaded
    Path("/proc/self/clear_refs").write_text("5")  # the most memory from now on
    before = mib("VmRSS")
    state = jax.block_until_ready(compiled.init(init, key))
    found = {"share": sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**20}
    print(json.dumps({**found, "peak": mib("VmHWM") - before}), flush=True)


if __name__ == "__main__":
    main()
