"""Recurrences, state-space models, graphs, and dtypes that are not f32."""

from __future__ import annotations

import functools

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.situations import UserStep, situation
from tests.support.situations.models import (
    ADAM,
    LAYERS,
    MICROBATCHES,
    WIDTH,
    WORDS,
    cross_entropy,
    dense,
    multilayer,
    tokens,
    updated,
)


class Translator(nn.Module):
    """An LSTM that reads, and one that writes with teacher forcing."""

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(WORDS, WIDTH, name="embed")
        carry, _ = nn.RNN(nn.OptimizedLSTMCell(WIDTH), return_carry=True)(embed(source))
        out = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(embed(target), initial_carry=carry)
        return nn.Dense(WORDS, name="head")(out)


@situation("google/flax:examples/seq2seq/train.py")
def translation():
    """The last state of the encoder's LSTM begins the decoder's, lengths mask the loss."""
    source, target = tokens(length=5), tokens(length=6)
    lengths = 2 + jnp.arange(8) % 4
    params = Translator().init(jax.random.key(0), source, target)["params"]

    def loss(params, source, target, lengths):
        logits = Translator().apply({"params": params}, source, target[:, :-1])
        mask = (jnp.arange(target.shape[1] - 1) < lengths[:, None]).astype(jnp.float32)
        return (cross_entropy(logits, target[:, 1:]) * mask).sum(), mask.sum()

    def step(state, *batch):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES, weighted=True)(state[0], *batch)
        return updated(*state, grads), value

    batch = source, target, lengths
    return UserStep(step, (params, ADAM.init(params)), batch, mpmd.by_parameters(r"LSTMCell_(\d)"))


@situation("google-deepmind/dm-haiku:examples/rnn/train.py")
def deep_recurrence():
    """Two LSTMs of haiku, unrolled together by a scan."""

    def one_hot(ids):
        return jax.nn.one_hot(ids, WORDS)

    def forward(ids):
        core = hk.DeepRNN([one_hot, hk.LSTM(WIDTH), jax.nn.relu, hk.LSTM(WIDTH), hk.nets.MLP([WIDTH, WORDS])])
        outputs, _ = hk.dynamic_unroll(core, ids.T, core.initial_state(len(ids)))
        return outputs.swapaxes(0, 1)

    net, ids = hk.without_apply_rng(hk.transform(forward)), tokens()
    params = net.init(jax.random.key(0), ids)

    def loss(params, ids):
        return cross_entropy(net.apply(params, ids)[:, :-1], ids[:, 1:]).mean()

    def step(state, ids):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state[0], ids)
        return updated(*state, grads), value

    return UserStep(step, (params, ADAM.init(params)), (ids,), "auto")


class Selective(nn.Module):
    """A block of Mamba: convolution over time, a selective scan, a gate."""

    @nn.compact
    def __call__(self, u):
        x, gate = jnp.split(nn.Dense(4 * WIDTH, use_bias=False)(nn.RMSNorm()(u)), 2, -1)
        x = nn.silu(nn.Conv(2 * WIDTH, (3,), padding=((2, 0),), feature_group_count=2 * WIDTH)(x))
        delta = nn.softplus(nn.Dense(2 * WIDTH)(x))
        b, c = jnp.split(nn.Dense(8, use_bias=False)(x), 2, -1)
        a = -jnp.exp(self.param("a_log", lambda *_: jnp.log(jnp.tile(jnp.arange(1.0, 5), (2 * WIDTH, 1)))))
        d = self.param("d", nn.initializers.ones, (2 * WIDTH,))
        decay = jnp.exp(delta[..., None] * a)
        given = delta[..., None] * b[:, :, None] * x[..., None]

        def combine(one, two):
            return one[0] * two[0], one[1] * two[0] + two[1]

        _, states = jax.lax.associative_scan(combine, (decay, given), axis=1)
        y = (states * c[:, :, None]).sum(-1) + d * x
        return u + nn.Dense(WIDTH, use_bias=False)(y * nn.silu(gate))


class SelectiveModel(nn.Module):
    """Four blocks, the embedding is the head."""

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(WORDS, WIDTH, name="embed")
        x = embed(ids)
        for number in range(LAYERS):
            x = Selective(name=f"layer_{number}")(x)
        return embed.attend(x)


@situation("radarFudan/mamba-minimal-jax:model.py")
def selective_scan():
    """Mamba: depthwise convolutions over time and an associative scan in each layer, tied embeddings."""
    ids = tokens()
    params = SelectiveModel().init(jax.random.key(0), ids)["params"]

    def loss(params, ids):
        return cross_entropy(SelectiveModel().apply({"params": params}, ids)[:, :-1], ids[:, 1:]).mean()

    def step(state, ids):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state[0], ids)
        return updated(*state, grads), value

    return UserStep(
        step, (params, ADAM.init(params)), (ids,), mpmd.by_parameters(r"layer_(\d+)"), tolerance=1e-4
    )


@situation("srush/annotated-s4:s4/s4d.py")
def convolution_by_fft():
    """S4D: complex kernels of a diagonal state space, convolved by Fourier transforms, features by `vmap`."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)

    def layer(key):
        one, two = jax.random.split(key)
        return {
            "real": jnp.zeros((WIDTH, 4)),
            "imaginary": jnp.pi * jnp.tile(jnp.arange(4.0), (WIDTH, 1)),
            "c": jax.random.normal(one, (WIDTH, 4, 2)) / 2,
            "log_step": jax.random.uniform(two, (WIDTH,), minval=-3.0, maxval=-1.0),
        }

    params = {f"layer_{n}": layer(k) for n, k in enumerate(keys[2:])}
    params |= {
        "encoder": jax.random.normal(keys[0], (1, WIDTH)),
        "head": jax.random.normal(keys[1], (WIDTH, 1)) / 3,
    }

    def of_feature(p, u):
        step, length = jnp.exp(p["log_step"]), len(u)
        a = -jnp.exp(p["real"]) + 1j * p["imaginary"]
        c = (p["c"][..., 0] + 1j * p["c"][..., 1]) * (jnp.exp(a * step) - 1) / a
        kernel = 2 * (c[:, None] * jnp.exp(a[:, None] * step * jnp.arange(length))).sum(0).real
        transformed = jnp.fft.rfft(jnp.pad(u, (0, length))) * jnp.fft.rfft(jnp.pad(kernel, (0, length)))
        return jnp.fft.irfft(transformed)[:length]

    def forward(params, u):
        x = u[:, None] @ params["encoder"]
        for number in range(LAYERS):
            mixed = jax.vmap(of_feature, (0, 1), 1)(params[f"layer_{number}"], x)
            x = x + jax.nn.gelu(mixed)
        return (x @ params["head"])[:, 0]

    def loss(params, u):
        return ((jax.vmap(forward, (None, 0))(params, u)[:, :-1] - u[:, 1:]) ** 2).mean()

    def step(state, u):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state[0], u)
        return updated(*state, grads), value

    u = jax.random.normal(jax.random.key(1), (8, 8))
    return UserStep(
        step, (params, ADAM.init(params)), (u,), mpmd.by_parameters(r"layer_(\d+)"), tolerance=1e-4
    )


@situation("google/flax:examples/ogbg_molpcba/train.py")
def graph_network():
    """Messages along edges by `segment_sum`, pooled per graph; labels that are NaN are masked."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = {f"layer_{n}": dense(k, 2 * WIDTH, 16, WIDTH) for n, k in enumerate(keys[1:])}
    params["head"] = jax.random.normal(keys[0], (WIDTH, 2)) / 3
    nodes = jax.random.normal(jax.random.key(1), (12, WIDTH))
    senders, receivers = jax.random.randint(jax.random.key(2), (2, 20), 0, 12)
    graphs = jnp.repeat(jnp.arange(4), 3)
    labels = jnp.where(jnp.arange(8) % 3 == 0, jnp.nan, jnp.arange(8.0) % 2).reshape(4, 2)

    def loss(params, nodes, senders, receivers, graphs, labels):
        for number in range(LAYERS):
            sent = jax.ops.segment_sum(nodes[senders], receivers, 12)
            nodes = nodes + multilayer(params[f"layer_{number}"], jnp.concatenate([nodes, sent], -1))
        pooled = jax.ops.segment_sum(nodes, graphs, 4) / 3
        known = ~jnp.isnan(labels)
        losses = optax.sigmoid_binary_cross_entropy(pooled @ params["head"], jnp.where(known, labels, 0))
        return jnp.where(known, losses, 0).sum() / known.sum()

    def step(state, *batch):
        value, grads = jax.value_and_grad(mpmd.staged(loss))(state[0], *batch)
        return updated(*state, grads), value

    batch = nodes, senders, receivers, graphs, labels
    return UserStep(step, (params, ADAM.init(params)), batch, mpmd.by_parameters(r"layer_(\d+)"))


class DecoderInBf16(nn.Module):
    """A decoder layer in bf16, whose parameters are f32."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        up = nn.Dense(2 * WIDTH, dtype=jnp.bfloat16, use_bias=False)
        gate = nn.Dense(2 * WIDTH, dtype=jnp.bfloat16, use_bias=False)
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16, use_bias=False)(nn.silu(gate(y)) * up(y)), None


class ScannedInBf16(nn.Module):
    """Layers in a scan, each with a checkpoint."""

    axis: int

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(WORDS, WIDTH, dtype=jnp.bfloat16, name="embed")(ids)
        layer = nn.remat(DecoderInBf16, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
        stack = nn.scan(
            layer, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(WORDS, name="head")(x.astype(jnp.float32))


def cast_step(axis, gradient_of):
    """A step of the scanned model, its state and its batch."""
    model, ids = ScannedInBf16(axis), tokens()
    params = model.init(jax.random.key(0), ids)["params"]

    def loss(params, ids):
        return cross_entropy(model.apply({"params": params}, ids)[:, :-1], ids[:, 1:]).mean()

    def step(state, ids):
        value, grads = gradient_of(loss)(state[0], ids)
        return updated(*state, grads), value

    return step, (params, ADAM.init(params)), (ids,)


@situation("AI-Hypercomputer/maxtext:MaxText/layers/models.py")
def scanned_in_bfloat16():
    """Scanned decoder layers in bf16 with f32 parameters, each with a checkpoint that saves nothing."""

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return UserStep(
        *cast_step(0, gradient), mpmd.split("layers"), tolerance=0.1
    )  # two compilers round bf16 elsewhere


@situation(
    "AI-Hypercomputer/maxtext:MaxText/configs/base.yml",
    refused="divides a scan over stacked parameters, but no scan has rows of what it matches",
)
def stacked_along_the_second_dim():
    """The same, with parameters stacked along their second dim (`param_scan_axis: 1`)."""

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return UserStep(*cast_step(1, gradient), mpmd.split("layers"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def quantised(x, axis):
    """Int8 and back, with the gradient of the identity."""
    scale = jnp.abs(x).max(axis, keepdims=True) / 127 + 1e-12
    return jnp.round(x / scale).astype(jnp.int8), scale


def _quantised_forward(x, axis):
    return quantised(x, axis), None


def _quantised_backward(axis, _, cotangents):
    return (cotangents[1],)


quantised.defvjp(_quantised_forward, _quantised_backward)


@jax.custom_vjp
def int8_product(x, w):
    """A product of int8 factors, added up in int32; its gradient is the product's of f32."""
    (a, of_a), (b, of_b) = quantised(x, -1), quantised(w, 0)
    return jax.lax.dot(a, b, preferred_element_type=jnp.int32) * of_a * of_b


int8_product.defvjp(lambda x, w: (int8_product(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@situation("AI-Hypercomputer/maxtext:MaxText/layers/quantizations.py")
def quantised_training():
    """Products of int8 factors in the forward, with straight-through gradients by `custom_vjp`."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = {f"layer_{n}": jax.random.normal(k, (WIDTH, WIDTH)) / 3 for n, k in enumerate(keys[1:])}
    params["head"] = jax.random.normal(keys[0], (WIDTH, 5)) / 3
    x, labels = jax.random.normal(jax.random.key(1), (8, WIDTH)), jnp.arange(8) % 5

    def loss(params, x, labels):
        for number in range(LAYERS):
            x = x + jax.nn.gelu(int8_product(x, params[f"layer_{number}"]))
        return cross_entropy(x @ params["head"], labels).mean()

    def step(state, x, labels):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state[0], x, labels)
        return updated(*state, grads), value

    stages = mpmd.by_parameters(r"layer_(\d+)")
    return UserStep(step, (params, ADAM.init(params)), (x, labels), stages, tolerance=1e-2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, params, x):
    """Where `z = f(params, x, z)`, with the gradient of the implicit function."""

    def again(carry):
        before, now, count = carry
        return (jnp.abs(now - before).max() > 1e-6) & (count < 60)

    def body(carry):
        return (carry[1], f(params, x, carry[1]), carry[2] + 1)

    start = jnp.zeros_like(x)
    return jax.lax.while_loop(again, body, (start, f(params, x, start), 0))[1]


def _fixed_forward(f, params, x):
    z = fixed_point(f, params, x)
    return z, (params, x, z)


def _fixed_backward(f, kept, g):
    params, x, z = kept
    of_z = jax.vjp(lambda z: f(params, x, z), z)[1]
    u = jax.lax.fori_loop(0, 40, lambda _, u: g + of_z(u)[0], g)
    return jax.vjp(lambda params, x: f(params, x, z), params, x)[1](u)


fixed_point.defvjp(_fixed_forward, _fixed_backward)


@situation("locuslab/deq:README.md")
def equilibrium():
    """Layers that are fixed points: a loop until it converges, with an implicit gradient by `custom_vjp`."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = {f"layer_{n}": 0.3 * jax.random.normal(k, (WIDTH, WIDTH)) / 3 for n, k in enumerate(keys[1:])}
    params["head"] = jax.random.normal(keys[0], (WIDTH, 5)) / 3
    x, labels = jax.random.normal(jax.random.key(1), (8, WIDTH)), jnp.arange(8) % 5

    def loss(params, x, labels):
        for number in range(LAYERS):
            x = fixed_point(lambda w, x, z: jnp.tanh(z @ w + x), params[f"layer_{number}"], x)
        return cross_entropy(x @ params["head"], labels).mean()

    def step(state, x, labels):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state[0], x, labels)
        return updated(*state, grads), value

    stages = mpmd.by_parameters(r"layer_(\d+)")
    return UserStep(step, (params, ADAM.init(params)), (x, labels), stages, tolerance=1e-4)
