"""A program may end while its fragments and messages are under way: it neither crashes nor hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 3)
import mpmd

def layer(w, x):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x

def step(weights, x):
    for stage, w in enumerate(weights):
        x = mpmd.named_computation(layer, name=f"stage{stage}")(w, x)
    return x

def issued(meshes):
    topology = mpmd.make_topology({f"m{m}": 1 for m in range(meshes)})
    config = mpmd.make_config(topology, {f"stage{m}": (f"m{m}", m) for m in range(meshes)})
    jitted = mpmd.jit(step, config)
    weights, x = [jnp.eye(512)] * meshes, jnp.ones((512, 512))
    jax.block_until_ready(jitted(weights, x))  # compiles
    yield
    for _ in range(12):
        x = jitted(weights, x)
    yield x

steps = [issued(meshes) for meshes in map(int, sys.argv[1:])]
for compiling in steps:
    next(compiling)
for x in [next(issuing) for issuing in steps]:
    print("ready" if x.is_ready() else "computing")
"""


@pytest.mark.parametrize("meshes", ["1 2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("1", "2"))])
def test_a_program_ends_although_fragments_are_under_way(meshes):
    """One mesh: its fragments have threads of their own.  Two: messages go from one client to the other."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, *meshes.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == {"computing"}, "everything was computed before the program ended"
