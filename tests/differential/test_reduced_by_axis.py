"""Over each axis of a mesh gradients are reduced once or in each microbatch: on {replica, fsdp}."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from examples.workloads.collectives import collectives
from examples.workloads.models import MODELS
from examples.workloads.steps import sgd_momentum, training_step
from mpmd.runtime.program.stream_memory import predict_memory
from mpmd.runtime.program.streams import Run
from tests.support.comparing import check_training

pytestmark = pytest.mark.usefixtures("plain_xla")

AXES = {"replica": 2, "fsdp": 2}
MICROBATCHES = 4
SCHEDULES = {"1f1b": 2, "zb_h1": 2, "interleaved_1f1b": 4}
SCATTERED = {"replica": "once", "fsdp": "per_microbatch"}
ALONG = {
    ((0, 1), (2, 3)): "fsdp",
    ((0, 2), (1, 3)): "replica",
    ((0, 1, 2, 3),): "both",
}


def setting(name, stages):
    """State, step and batch of a model, and their shardings; microbatches have a row for each device."""
    params, loss, batch = MODELS[name].build(stages)
    init, update = sgd_momentum()
    batch = jax.tree.map(lambda x: np.concatenate([np.asarray(x)] * 4), batch)

    def along_largest(leaf):
        largest = int(np.argmax(leaf.shape))
        return P(*("fsdp" if d == largest else None for d in range(leaf.ndim)))

    split = jax.tree.map(along_largest, params)
    given = ((split, split), *(P(("replica", "fsdp")) for _ in batch))
    return init(params), training_step(loss, MICROBATCHES, update), batch, given


def on_two_meshes(step, stages, given, schedule="1f1b", backend=None, **options):
    config = mpmd.make_config(
        mpmd.make_topology({"m0": AXES, "m1": AXES}),
        {f"stage{s}": f"m{s % 2}" for s in range(stages)},
        schedule=schedule,
        in_shardings=given,
        backend=backend,
        options=mpmd.PipelineOptions(**options),
    )
    return mpmd.jit(step, config)


def executed(compiled):
    """Bytes of a step's reductions as executed: in microbatches or not, by kind and by axes."""
    found = Counter()
    for stream in compiled.program.streams:
        for op in stream.instructions:
            if isinstance(op, Run):
                for c in collectives(compiled.executables[op.executable].as_text("hlo"), 4):
                    along = ALONG[tuple(sorted(tuple(sorted(group)) for group in c.groups))]
                    if c.kind in ("all-reduce", "reduce-scatter"):
                        found[op.microbatch is not None, c.kind, along] += c.size
    return found


SCALARS = 64
"""Bytes of losses and the like, which are reduced once over all axes."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "native"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "scanned_layers"])
def test_three_ways(name, schedule, backend):
    stages = SCHEDULES[schedule]
    state, step, batch, given = setting(name, stages)
    ways = {}
    for way, said in (("once", "once"), ("scattered", SCATTERED), ("each", "per_microbatch")):
        jitted = on_two_meshes(step, stages, given, schedule, backend, reduce_gradients=said)
        check_training(jitted, jax.jit(step), state, batch, MODELS[name].tolerance)
        ways[way] = executed(jitted.compiled(state, *batch))
    once, scattered, each = ways.values()
    parts = scattered[True, "reduce-scatter", "fsdp"]
    if (name, schedule) != ("scanned_layers", "zb_h1"):  # a loop stacks what another program reads
        assert once[False, "reduce-scatter", "fsdp"] == scattered[False, "all-reduce", "replica"]
        assert parts == MICROBATCHES * scattered[False, "all-reduce", "replica"]
        assert not [key for key, size in once.items() if key[0] and size > SCALARS]
        assert scattered[True, "all-reduce", "replica"] == scattered[True, "all-reduce", "both"] == 0
    assert parts > 0
    if name == "mlp":  # in a loop, a text has them once
        assert sum(size for key, size in each.items() if key[0]) > parts


def peak(lowered):
    return max(m.peak_bytes // 4 for m in predict_memory(lowered.program))


def test_the_way_that_fits_is_chosen():
    state, step, batch, given = setting("mlp", 2)

    def lowered(**options):
        return on_two_meshes(step, 2, given, gather_weights="once", **options).lower(state, *batch)

    once = lowered()
    scattered = lowered(reduce_gradients=SCATTERED)
    assert peak(scattered) < peak(once)
    assert not lowered(device_memory_bytes=peak(once)).warnings
    chosen = lowered(device_memory_bytes=peak(scattered))
    assert peak(chosen) == peak(scattered)
    (warning,) = chosen.warnings
    assert warning.startswith("reduce_gradients=fsdp:per_microbatch,replica:once, as a device would hold ")
    assert f"{peak(once):,} bytes otherwise" in warning
