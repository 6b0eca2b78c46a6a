"""Low precision in stages: fp8 and its histories over microbatches, loss scales, stochastic rounding."""

from __future__ import annotations

import dataclasses

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
from mpmd.cost.device import HOST
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


OFFLOADED = {
    "names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "products": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "saved": jax.checkpoint_policies.save_only_these_names("hidden"),
}


def hidden_layer(policy):
    """A layer with one residual of its input's size, which `policy` saves or offloads."""

    def layer(w, x):
        return jnp.tanh(checkpoint_name(x @ w, "hidden"))

    return jax.checkpoint(layer, policy=OFFLOADED[policy])


def offloading_step(policy, scanned, meshes=4, schedule="1f1b"):
    """Stages of two layers; the jitted step, the step, and its arguments."""
    layer = hidden_layer(policy)

    def stage(weights, x):
        if scanned:
            return jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0]
        return layer(weights[1], layer(weights[0], x))

    def loss(params, x):
        for i, weights in enumerate(params):
            x = mpmd.named_computation(stage, name=f"stage{i}")(weights, x)
        return (x**2).mean()

    step = mpmd.accumulate_gradients(loss, 2 * meshes)
    topology = mpmd.make_topology({f"m{i}": 1 for i in range(meshes)})
    placed = {f"stage{i}": f"m{i}" for i in range(meshes)}
    config = mpmd.make_config(topology, placed, schedule=schedule)
    params = [jnp.asarray(normal(i, 2, WIDTH, WIDTH)) for i in range(meshes)]
    return mpmd.jit(step, config), step, (params, jnp.asarray(normal(9, 4 * meshes, WIDTH)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["names", "products"])
@pytest.mark.parametrize("scanned", [False, True], ids=["separate", "scanned"])
def test_offloaded_residuals_wait_in_host_memory(scanned, policy):
    """1F1B: the first mesh waits with four microbatches; one is in use and one on its way back."""
    held, text = {}, ""
    for kind in ("saved", policy):
        pipelined, step, args = offloading_step(kind, scanned)
        compiled = pipelined.lower(*args).compile()
        assert pipelined.lower(*args).warnings == []
        got, measured = compiled.measure.live_bytes(*args)
        assert relative_difference(mpmd.fetch(got), jax.jit(step)(*args)) < 1e-5
        predicted = compiled.memory_analysis()
        held[kind] = measured, {m: predicted[m].peak_bytes - predicted[m].kept_bytes for m in predicted}
        text = compiled.as_text("program")
    residuals = 2 * 2 * WIDTH * 4  # bytes of one microbatch: two rows in two layers
    saved = [[held["saved"][k][m] - held[policy][k][m] for m in ("m0", "m1", "m2", "m3")] for k in (0, 1)]
    assert saved[0] == saved[1] == [2 * residuals, residuals, 0, 0]
    assert predicted["m0"].host_bytes == 3 * residuals and "in pinned_host = copy" in text


def test_copies_of_offloaded_residuals_are_priced():
    pipelined, _, args = offloading_step("names", scanned=True)
    lowered = pipelined.lower(*args)
    slow = dataclasses.replace(HOST, host_bandwidth=1e4)
    predicted = [lowered.schedule(lowered.estimated_costs(device)) for device in (HOST, slow)]
    assert predicted[0].makespan_s < predicted[1].makespan_s
    there = [span for span in predicted[1].transfers if span.peer == "m0#pinned_host"]
    back = [span for span in predicted[1].transfers if span.mesh == "m0#pinned_host"]
    assert len(there) == len(back) > 0
    seconds = slow.host_copy_seconds(2 * 2 * WIDTH * 4)
    assert [span.seconds for span in (*there, *back)] == pytest.approx([seconds] * 2 * len(there))


def test_residuals_that_nothing_waits_with_stay_and_say_so():
    pipelined, _, args = offloading_step("names", scanned=False, meshes=1)
    message = (
        r"jax.checkpoint offloads stay in device memory: f32\[2,8\] \(2 times\)\n  .* at least two tasks"
    )
    with pytest.warns(UserWarning, match=message):
        lowered = pipelined.lower(*args)
    assert "pinned_host" not in lowered.as_text("mpmd")


@pytest.mark.slow
def test_fp8_layers_in_named_stages():
    dense = nn.Dense(WIDTH, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)

    def loss(stages, x):
        for i, variables in enumerate(stages):
            x = mpmd.named_computation(lambda v, x: x + jnp.tanh(dense.apply(v, x)), name=f"s{i}")(
                variables, x
            )
        return (x**2).mean()

    stages = [dense.init(jax.random.key(i), X) for i in range(2)]
    step = mpmd.accumulate_gradients(loss, MICROBATCHES)
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"s0": "m0", "s1": "m1"})
    got, want = mpmd.jit(step, config)(stages, X), jax.jit(step)(stages, X)
    assert relative_difference(mpmd.fetch(got), want) < 1e-5
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(want[1][0][OVERWRITTEN]))


@jax.custom_vjp
def cotangent_times(x, scale):
    """`x`, with a cotangent that is multiplied."""
    return x


cotangent_times.defvjp(lambda x, scale: (x, scale), lambda scale, g: (g * scale, jnp.zeros_like(scale)))


def test_each_stage_has_a_loss_scale_of_its_own():
    """The cotangent is scaled where it enters a stage, and back where it leaves; one overflow skips all."""

    def loss(params, scales, x):
        def stage(w, scale, x):
            return cotangent_times(jnp.tanh(cotangent_times(x, 1 / scale) @ w), scale)

        for i, (w, scale) in enumerate(zip(params, scales, strict=True)):
            x = mpmd.named_computation(stage, name=f"s{i}")(w, scale, x)
        return (x**2).mean()

    def step(state, x):
        params, scales = state
        _, grads = mpmd.accumulate_gradients(lambda p, x: loss(p, scales, x), MICROBATCHES)(params, x)
        finite = [jnp.isfinite(g).all() for g in grads]
        taken = jnp.array(finite).all()
        new = [jnp.where(taken, p - g / s, p) for p, g, s in zip(params, grads, scales, strict=True)]
        scales = [jnp.where(f, 2 * s, s / 2) for f, s in zip(finite, scales, strict=True)]
        return (new, scales), (grads, taken)

    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"s0": "m0", "s1": "m1"})
    pipelined = mpmd.jit(step, config)
    state = expected = params_of()["layers"], [jnp.float32(2.0**8), jnp.float32(2.0**12)]
    for x, taken in ((X, True), (X * np.float32(np.inf), False)):
        before = mpmd.fetch(state)[0]
        (state, seen), (expected, want) = pipelined(state, x), jax.jit(step)(expected, x)
        got = mpmd.fetch((state, seen))
        assert relative_difference(got[0], expected) < 1e-5 and bool(got[1][1]) == bool(want[1]) == taken
        assert taken or relative_difference(got[0][0], before) == 0
    assert float(got[0][1][0]) != float(got[0][1][1])
