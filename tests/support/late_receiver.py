"""Three processes; the second one calls the step late, and a message to the third one depends on it.

    python -m tests.support.late_receiver

    m0: z = first(x), to m1        m1: y = middle(z), to m0        m0: w = second(y), to m2

`w` is large, and its receiver asks for it long before `z` is asked for.
"""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

ROWS, LATE_SECONDS = 16, 1.5


def step(x):
    z = mpmd.named_computation(lambda x: x + 1, name="first")(x)
    y = mpmd.named_computation(lambda z: z * 2, name="middle")(z)
    w = mpmd.named_computation(lambda y: jnp.tile(y, (ROWS, 1)), name="second")(y)
    return mpmd.named_computation(lambda w: w.sum(axis=0), name="last")(w)


def main() -> None:
    topology = mpmd.make_topology({f"m{m}": 1 for m in range(3)})
    placed = {"first": "m0", "middle": "m1", "second": "m0", "last": "m2"}
    jitted = mpmd.jit(step, mpmd.make_config(topology, placed))
    x = np.arange(1 << 18, dtype=np.float32)
    compiled = jitted.lower(x).compile()
    if jax.process_index() == 1:
        time.sleep(LATE_SECONDS)
    result = np.asarray(mpmd.fetch(compiled(x)))
    right = bool((result == (x + 1) * 2 * ROWS).all())
    print(json.dumps({"process": jax.process_index(), "right": right}), flush=True)


if __name__ == "__main__":
    main()
