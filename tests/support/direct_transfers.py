"""Trains with arrays that are sent directly between processes, and prints what came out as a JSON line.

    python -m tests.support.direct_transfers TRANSFERS MESHES DEVICES STEPS

Each mesh has so many devices, over which rows are split.  On CPUs `jax.device_put` between processes goes
through sockets of JAX's own, with a flag, for which each process names a port.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import mpmd


def loss(params, x, y):
    for k, w in enumerate(params):
        x = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name=f"stage{k}")(w, x)
    return mpmd.named_computation(lambda x, y: jnp.mean((x - y) ** 2), name="loss")(x, y)


def step(params, x, y):
    value, gradients = mpmd.accumulate_gradients(loss, num_microbatches=4)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def main() -> None:
    transfers, (meshes, devices, steps) = sys.argv[1], map(int, sys.argv[2:5])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{port}")
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", meshes * devices)
    topology = mpmd.make_topology({f"m{k}": devices for k in range(meshes)})
    placed = {f"stage{k}": f"m{k % meshes}" for k in range(meshes)} | {"loss": f"m{meshes - 1}"}
    rows = PartitionSpec("data") if devices > 1 else None
    config = mpmd.make_config(
        topology, placed, schedule="1f1b", backend="xla", in_shardings=(None, rows, rows)
    )
    jitted = mpmd.jit(step, config)
    params = [np.eye(16, dtype=np.float32) + 0.01 * k for k in range(meshes)]
    x = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    compiled = jitted.lower(params, x, x).compile(runtime=mpmd.RuntimeOptions(transfers=transfers))
    losses, begin = [], time.perf_counter()
    for _ in range(steps):
        params, value = compiled(params, x, x)
        losses.append(float(value).hex())
    seconds = time.perf_counter() - begin
    leaves = jax.tree.leaves(mpmd.fetch(params))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()[:16]
    pairs = getattr(compiled.runner.executor, "pairs", ())
    found = {"process": jax.process_index(), "losses": losses, "state": digest, "pairs": len(pairs)}
    print(json.dumps({**found, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
