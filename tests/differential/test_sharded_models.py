"""Models split over the devices of their meshes, by data, by tensor and both, train as on one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.comparing import check_training, pipelined, sgd_momentum, training_step
from tests.support.sharded_models import SHARDED_MODELS, STAGES

MESHES = {
    "one device": {"data": 1, "model": 1},
    "two for data": {"data": 2},
    "two for tensors": {"model": 2},
    "four for data": {"data": 4},
    "four for tensors": {"model": 4},
    "two and two": {"data": 2, "model": 2},
}
FAST = {
    ("mlp", "two and two"),
    ("mlp", "four for tensors"),
    ("transformer", "two for tensors"),
    ("mixture", "two and two"),
}


def shardings(model, axes):
    """For `step(state, *batch)`: parameters by `model` and batches by `data`, as far as there are such axes."""
    state = (model.specs, model.specs) if "model" in axes else None
    return {"in_shardings": (state, *(P("data") if "data" in axes else None for _ in model.batch))}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(n, m, marks=[] if (n, m) in FAST else pytest.mark.slow)
        for n in SHARDED_MODELS
        for m in MESHES
    ],
)
def test_a_split_model_trains_as_on_one_device(name, mesh, schedule):
    model, axes = SHARDED_MODELS[name](), MESHES[mesh]
    init, update = sgd_momentum()
    step = training_step(model.loss, 2, update)
    jitted = pipelined(step, STAGES, schedule, mesh=axes, options=shardings(model, axes), donate_argnums=0)
    check_training(jitted, jax.jit(step), init(model.params), model.batch)
    check_split(jitted, model, init(model.params), axes)


def check_split(jitted, model, state, axes):
    """Every device holds its part of each parameter, and no more."""
    (params, velocity), _ = jitted(jax.tree.map(np.array, state), *model.batch)
    for tree in (params, velocity):
        for spec, leaf in zip(
            jax.tree.leaves(model.specs, is_leaf=lambda x: isinstance(x, P)), jax.tree.leaves(tree)
        ):
            parts = np.prod([axes.get(name, 1) for name in spec if name is not None], dtype=int)
            assert leaf.addressable_shards[0].data.size == leaf.size // parts
