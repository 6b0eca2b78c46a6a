"""Low precision in stages: fp8 and its histories over microbatches, loss scales, stochastic rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from jax.ad_checkpoint import checkpoint_name

import mpmd
from examples.workloads.models import normal
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

WIDTH, LAYERS, MICROBATCHES = 8, 4, 4
OVERWRITTEN = fp8_ops.OVERWRITE_WITH_GRADIENT
STAGES = {"separate": mpmd.by_parameters(r"layers_(\d+)"), "stacked": mpmd.split("layers")}
X = normal(0, 8, WIDTH)


class QuantisedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(nn.Dense(WIDTH, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)), None


class QuantisedNet(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(QuantisedLayer, prevent_cse=False)
        if self.kind == "separate":
            for i in range(LAYERS):
                x, _ = layer(name=f"layers_{i}")(x, None)
            return x
        axes = {"params": 0, OVERWRITTEN: 0}
        scanned = nn.scan(layer, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
        return scanned(name="layers")(x, None)[0]


def loss_of(kind, extended):
    def loss(variables, x):
        if extended:
            meta = jax.tree.map(
                lambda a: jax.lax.convert_element_type(a, fp8_ops.fm32), variables[OVERWRITTEN]
            )
            variables = {**variables, OVERWRITTEN: meta}
        return (QuantisedNet(kind).apply(variables, x) ** 2).mean()

    return loss


def run(step, stages, *args):
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    pipelined = mpmd.jit(step, mpmd.make_config(topology, stages=stages, schedule="1f1b"))
    assert pipelined.lower(*args).warnings == []
    return mpmd.fetch(pipelined(*args))


@pytest.mark.slow
@pytest.mark.parametrize("extended", [False, True], ids=["f32", "fm32"])
@pytest.mark.parametrize("kind", STAGES)
def test_fp8_layers_rematerialised_in_stages(kind, extended):
    variables = QuantisedNet(kind).init(jax.random.key(0), X)
    step = mpmd.accumulate_gradients(loss_of(kind, extended), MICROBATCHES)
    assert relative_difference(run(step, STAGES[kind], variables, X), jax.jit(step)(variables, X)) < 1e-5


def test_histories_of_fp8_are_maxima_over_microbatches():
    """Of inputs and kernels as if one microbatch had all rows; a cotangent is of a mean of fewer rows."""
    variables = QuantisedNet("stacked").init(jax.random.key(0), X)
    loss = loss_of("stacked", extended=False)
    _, pieces = jax.jit(mpmd.accumulate_gradients(loss, MICROBATCHES))(variables, X)
    whole = jax.jit(jax.grad(loss))(variables, X)
    pieces, whole = (
        {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree[OVERWRITTEN])}
        for tree in (pieces, whole)
    )
    for name in ("input_amax_history", "kernel_amax_history", "input_scale", "kernel_scale"):
        np.testing.assert_allclose(pieces[name], whole[name], rtol=1e-5)
    assert (pieces["output_grad_amax_history"][:, 0] > whole["output_grad_amax_history"][:, 0]).all()


def deep(params, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w.astype(jnp.float32))
    return (x**2).mean()


def params_of(dtype=jnp.float32):
    return {"layers": [jnp.asarray(normal(i, WIDTH, WIDTH), dtype) for i in range(2)]}


BY_LAYER = mpmd.by_parameters(r"layers/(\d+)")


@pytest.mark.slow
def test_a_dynamic_loss_scale_skips_a_step_on_all_meshes():
    """One batch is not finite: no parameter of any mesh changes, and the scale is halved."""
    tx = optax.adam(1e-2, eps=1e-3)

    def step(state, x):
        params, opt, scale = state
        scaled = mpmd.accumulate_gradients(lambda p, x: deep(p, x) * scale, MICROBATCHES)
        loss, grads = scaled(params, x)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        updates, new_opt = tx.update(grads, opt, params)
        new = optax.apply_updates(params, updates), new_opt
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt))
        return (*kept, jnp.where(finite, scale * 2, scale / 2)), loss / scale

    params = params_of()
    state = expected = params, tx.init(params), jnp.float32(2.0**10)
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    pipelined = mpmd.jit(step, mpmd.make_config(topology, stages=BY_LAYER, schedule="1f1b"))
    scales = [float(state[2])]
    for x in (X, X * np.float32(np.inf), X):
        (state, _), (expected, _) = pipelined(state, x), jax.jit(step)(expected, x)
        scales.append(float(state[2]))
        got, want = mpmd.fetch(state), expected
        assert got[2] == want[2] and (int(got[1][0].count) == int(want[1][0].count))
    assert relative_difference(mpmd.fetch(state[:2]), expected[:2]) < 1e-5
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**11] and int(mpmd.fetch(state)[1][0].count) == 2


@pytest.mark.slow
def test_stochastic_rounding_is_that_of_jit_bit_for_bit():
    """bf16 parameters rounded with one key per leaf: the same bits as under `jax.jit` for the same update."""

    def rounded(key, x):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jax.random.bits(key, x.shape, jnp.uint16)
        cut = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return cut.astype(jnp.bfloat16)

    def step(params, x, key):
        loss, grads = mpmd.accumulate_gradients(deep, 1)(params, x)
        keys = jax.random.split(key, 2)
        layers = [
            rounded(k, p.astype(jnp.float32) - jnp.sign(g.astype(jnp.float32)) * 2.0**-9)
            for k, p, g in zip(keys, params["layers"], grads["layers"], strict=True)
        ]
        return {"layers": layers}, loss

    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    pipelined = mpmd.jit(step, mpmd.make_config(topology, stages=BY_LAYER))
    args = params_of(jnp.bfloat16), X, jax.random.key(3)
    got, want = jax.device_get(pipelined(*args)[0]), jax.jit(step)(*args)[0]
    for ours, theirs in zip(got["layers"], want["layers"], strict=True):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint16), np.asarray(theirs).view(np.uint16))


@pytest.mark.slow
def test_a_policy_that_offloads_computes_the_same_and_says_that_nothing_moves():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(params, x):
        def layer(w, x):
            return checkpoint_name(jnp.tanh(x @ w), "hidden") @ w

        for w in params["layers"]:
            x = jax.checkpoint(layer, policy=policy)(w, x)
        return (x**2).mean()

    step = mpmd.accumulate_gradients(loss, MICROBATCHES)
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    pipelined = mpmd.jit(step, mpmd.make_config(topology, stages=BY_LAYER, schedule="1f1b"))
    with pytest.warns(UserWarning, match=r"jax.checkpoint offloads are not moved to host memory: f32\[2,8\]"):
        got = pipelined(params_of(), X)
    assert relative_difference(mpmd.fetch(got), jax.jit(step)(params_of(), X)) < 1e-5
