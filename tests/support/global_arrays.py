"""Arguments and results of a mesh over all processes, one JSON line of each.

python -m tests.support.global_arrays
"""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import mpmd
from mpmd.errors import AbsentValueError, SignatureError

ROWS, WIDTH = 8, 4


def main() -> None:
    me, count = jax.process_index(), jax.process_count()
    topology = mpmd.make_topology({"m0": len(jax.devices())})
    config = mpmd.make_config(
        topology, {"f": "m0"}, in_shardings=(None, PartitionSpec("data")), backend="xla"
    )

    @mpmd.named_computation(name="f")
    def f(w, x):
        return jax.numpy.tanh(x @ w)

    def step(w, x):
        y = f(w, x)
        return y, y.sum()

    w = np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
    x = np.linspace(-2, 2, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    compiled = mpmd.jit(step, config).compiled(w, x)
    rows = x[me * ROWS // count : (me + 1) * ROWS // count]
    given = {
        "host": x,
        "on a device": jax.numpy.asarray(x),
        "rows": jax.make_array_from_process_local_data(compiled.input_shardings[0][1], rows),
        "loaded": compiled.load(lambda path, leaf, index: x[index], argnum=1),
        "whole on all": jax.make_array_from_callback(
            x.shape, jax.sharding.NamedSharding(topology["m0"], PartitionSpec()), lambda index: x[index]
        ),
    }
    results = {name: compiled(w, value) for name, value in given.items()}
    totals = {name: float(total) for name, (_, total) in results.items()}
    y = results["host"][0]
    with pytest.raises(AbsentValueError) as page:
        np.asarray(y)
    with pytest.raises(SignatureError, match="is in another process") as refused:
        elsewhere = jax.sharding.Mesh(np.array(jax.devices()[::2]), ("data",))
        sharding = jax.sharding.NamedSharding(elsewhere, PartitionSpec("data"))
        compiled(w, jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]))
    np.testing.assert_allclose(np.asarray(mpmd.fetch(y)), np.tanh(x @ w), rtol=1e-6)
    (_, total), timeline = compiled.timeline(w, x)
    (_, total), costs = compiled.costs(w, x)
    found = {
        "process": me,
        "totals": totals | {"observed": float(total)},
        "page": str(page.value),
        "refused": str(refused.value),
        "spans": [(s.mesh, s.name, s.start_s, s.end_s) for s in timeline.spans],
        "costs": dict(costs.fragments),
        "table": str(topology),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
