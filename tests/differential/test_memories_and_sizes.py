"""Meshes of different sizes, with shardings of their own, and state in host memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from examples.workloads.models import MODELS
from examples.workloads.steps import sgd_momentum, training_step
from mpmd.errors import FragmentError, PassError
from tests.support.comparing import copied, relative_difference
from tests.support.evaluate_mpmd import evaluate
from tests.support.random_steps import sharded

pytestmark = pytest.mark.usefixtures("plain_xla")

SIZES = {
    "one and two": ({"m0": 1, "m1": 2}, None),
    "two and four": ({"m0": {"m0_data": 2}, "m1": {"m1_data": 4}}, (P("m0_data"), P("m1_data"))),
    "four and one": (
        {"m0": {"m0_data": 2, "m0_model": 2}, "m1": {"m1_data": 1}},
        (P("m0_data", "m0_model"), None),
    ),
}
FAST = {"two and four"}


def trained(meshes, **options):
    """Two steps of an MLP on two meshes; what they give, what `jax.jit` gives, and the compiled step."""
    params, loss, batch = MODELS["mlp"].build(2)
    init, update = sgd_momentum()
    step = training_step(loss, 2, update)
    config = mpmd.make_config(mpmd.make_topology(meshes), {"stage0": "m0", "stage1": "m1"}, **options)
    pipelined, plain = mpmd.jit(step, config, donate_argnums=0), jax.jit(step)
    got = pipelined(pipelined(copied(init(params)), *batch)[0], *batch)
    want = plain(plain(init(params), *batch)[0], *batch)
    assert relative_difference(got, want) <= 1e-5
    return got, pipelined.compiled(init(params), *batch)


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in SIZES])
def test_what_is_sent_between_meshes_of_different_sizes_is_sharded_anew(case):
    meshes, specs = SIZES[case]
    options = {} if specs is None else {"in_shardings": (None, *specs)}
    _, compiled = trained(meshes, **options)
    if case == "two and four":
        sent = {kind.sharding for channel in compiled.program.channels for kind in channel.types}
        assert sent == {'<@m0, [{"m0_data"}, {}]>', '<@m1, [{"m1_data"}, {}]>'}


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_optimizer_state_in_host_memory(devices):
    host, device = ({s: f"m{k}{kind}" for k, s in enumerate(("s0", "s1"))} for kind in ("#pinned_host", ""))
    state = (device, host)
    (new, _), compiled = trained(
        {"m0": devices, "m1": devices}, input_meshes=(state, None, None), output_meshes=(state, None)
    )
    kinds = [{leaf.sharding.memory_kind for leaf in jax.tree.leaves(part)} for part in new]
    assert kinds == [{"device"}, {"pinned_host"}]
    assert "in pinned_host = copy" in compiled.as_text("program")


def test_a_fragment_that_needs_more_memory_than_there_is():
    """64 TiB cannot be had; a smaller batch goes through afterwards."""

    def spread(x):
        return jax.lax.sort(jnp.tanh(jnp.outer(x, x)), dimension=0).sum(1) + x

    first = mpmd.named_computation(lambda w, x: w * x, name="first")
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"first": "m0", "spread": "m1"})
    step = mpmd.jit(lambda w, x: mpmd.named_computation(spread, name="spread")(first(w, x)), config)
    compiled = step.lower(2.0, jnp.ones(1 << 22)).compile(runtime=mpmd.RuntimeOptions(blocking=True))
    message = r"^fragment 'p1_spread.*' failed on mesh 'm1', step 0: JaxRuntimeError: RESOURCE_EXHAUSTED"
    with pytest.raises(FragmentError, match=message):
        compiled(2.0, jnp.ones(1 << 22))
    assert step(2.0, jnp.ones(8)).shape == (8,)


UNLIKE = {
    "one and two": {"m0": {"x": 1}, "m1": {"x": 2}},
    "four and two": {"m0": {"x": 4}, "m1": {"x": 2}},
    "other axes": {"m0": {"x": 2}, "m1": {"y": 2}},
    "more axes": {"m0": {"x": 2, "y": 2}, "m1": {"x": 2}},
    "another order": {"m0": {"x": 2, "y": 2}, "m1": {"y": 2, "x": 2}},
}
LAYERS = {
    "plain": lambda w, h: jnp.tanh(h @ w),
    "constrained": lambda w, h: sharded(None, "x")(jnp.tanh(sharded("x")(h) @ w)),
    "in a loop": lambda w, h: jax.lax.fori_loop(0, 2, lambda _, c: jnp.tanh(sharded("x")(c) @ w), h),
    "in a branch": lambda w, h: jax.lax.cond(h.sum() > 0, lambda h: sharded("x")(h @ w), lambda h: h, h),
}
SPECS = {
    "nothing": {},
    "inputs": {"in_shardings": (P(None, "x"), P("x"))},
    "all": {"in_shardings": (None, P("x")), "out_shardings": P()},
}


def two_layers(layer, microbatches):
    """Gradients of a constrained layer on m0, unnamed work, and a plain layer on m1."""

    def loss(params, x):
        h = mpmd.named_computation(LAYERS[layer], name="f0")(params[0], x)
        h = sharded("x")(2 * h)
        return (mpmd.named_computation(LAYERS["plain"], name="f1")(params[1], h) ** 2).mean()

    def step(params, x):
        if not microbatches:
            return jax.value_and_grad(loss)(params, x)
        return mpmd.accumulate_gradients(loss, microbatches)(params, x)

    x = np.random.default_rng(0).normal(size=(8 * max(microbatches, 1), 4)).astype(np.float32)
    return step, (list(np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 4, 4)), x)


def jitted(step, meshes, **options):
    return mpmd.jit(step, mpmd.make_config(mpmd.make_topology(meshes), {"f0": "m0", "f1": "m1"}, **options))


@pytest.mark.parametrize("microbatches", [1, *(pytest.param(m, marks=pytest.mark.slow) for m in (0, 2))])
@pytest.mark.parametrize(
    "layer", [k if k == "constrained" else pytest.param(k, marks=pytest.mark.slow) for k in LAYERS]
)
@pytest.mark.parametrize("meshes", UNLIKE)
def test_shardings_on_meshes_that_are_not_alike(meshes, layer, microbatches):
    step, given = two_layers(layer, microbatches)
    want = jax.tree.leaves(jax.jit(step)(*given))
    for options in SPECS.values():
        lowered = jitted(step, UNLIKE[meshes], **options).lower(*given)
        got = evaluate(lowered.partitioned.module, jax.tree.leaves(given))
        assert relative_difference(got, want) <= 1e-5, options


@pytest.mark.parametrize("meshes", ["one and two", pytest.param("another order", marks=pytest.mark.slow)])
def test_a_constrained_layer_runs_on_meshes_that_are_not_alike(meshes):
    step, given = two_layers("constrained", 1)
    got = jitted(step, UNLIKE[meshes], **SPECS["inputs"])(*given)
    assert relative_difference(got, jax.jit(step)(*given)) <= 1e-5


def test_a_shard_map_over_an_axis_of_two_sizes_is_refused_once():
    def mapped(x):
        return jax.shard_map(jnp.tanh, in_specs=P("x"), out_specs=P("x"))(x)

    def step(x):
        def body(total, x):
            x = mpmd.named_computation(mapped, name="f0")(x)
            return total + mpmd.named_computation(jnp.sum, name="f1")(x), None

        return mpmd.microbatch_loop(body, jnp.float32(0), x, num_microbatches=2)

    message = r"^jax.shard_map runs on mesh 'm0' with x=1, but was traced with x=2 \(.*_sizes.py:\d+"
    with pytest.raises(PassError, match=message):
        jitted(step, UNLIKE["one and two"]).lower(jnp.ones((8, 4)))
