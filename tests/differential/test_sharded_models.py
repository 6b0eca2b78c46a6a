"""Models split over the devices of their meshes, by data, by tensor and both, train as on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from examples.workloads.models import D, chain, normal, regression_batch
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from mpmd.errors import PassError
from tests.support.comparing import check_training, messages, programs_per_mesh
from tests.support.sharded_models import MESHES, SHARDED_MODELS, STAGES, UNLIKE, pipelined_on, shardings

pytestmark = pytest.mark.usefixtures("plain_xla")

FAST = {("mixture", "two and two")}


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


FAST_UNLIKE = {("mixture", "two and four for tensors")}


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        pytest.param(n, m, marks=[] if (n, m) in FAST_UNLIKE else pytest.mark.slow)
        for n in SHARDED_MODELS
        for m in UNLIKE
    ],
)
def test_a_model_on_meshes_that_are_not_alike_trains_as_on_one_device(name, meshes):
    model, axes = SHARDED_MODELS[name](), UNLIKE[meshes]
    init, update = sgd_momentum()
    step = training_step(model.loss, 2, update)
    options = shardings(model, axes[0] | axes[1])
    jitted = pipelined_on(step, axes, options)
    check_training(jitted, jax.jit(step), init(model.params), model.batch)
    if "model" in axes[0] | axes[1]:
        (params, _), _ = jitted(init(model.params), *model.batch)
        for s, own in enumerate(axes):
            up = params[f"s{s}"]["up"]
            assert up.addressable_shards[0].data.size == up.size // own.get("model", 1)


def lower_on(meshes, options):
    model = SHARDED_MODELS["mlp"]()
    init, update = sgd_momentum()
    jitted = pipelined_on(training_step(model.loss, 2, update), meshes, options)
    return jitted.lower(init(model.params), *model.batch)


def test_meshes_that_are_not_alike_need_no_more_messages_and_programs():
    lowered = lower_on(UNLIKE["two and four for data"], {"in_shardings": (None, P("data"), P("data"))})
    assert messages(lowered.program) == 2 * 2
    assert max(programs_per_mesh(lowered.program).values()) <= 4
    sent = {str(t.sharding) for channel in lowered.program.channels for t in channel.types}
    assert sent == {'<@m0, [{"data"}, {}]>', '<@m1, [{"data"}, {}]>'}


def test_a_shard_map_over_axes_of_different_sizes_is_refused():
    def layer(p, x):
        return jax.shard_map(jnp.tanh, in_specs=P("data"), out_specs=P("data"))(x @ p)

    params = {"s0": normal(0, D, D), "s1": normal(1, D, D)}
    jitted = pipelined_on(chain(2, layer), ({"data": 2}, {"data": 4}), {})
    with pytest.raises(
        PassError, match="jax.shard_map runs on mesh 'm0' with data=2, but was traced with data=4"
    ):
        jitted.lower(params, *regression_batch())
