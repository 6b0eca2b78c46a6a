"""Losses that are more than a mean over rows."""

from __future__ import annotations

import flax.linen as nn
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
    Causal,
    Residual,
    classified,
    cross_entropy,
    dense,
    multilayer,
    tokens,
    updated,
)


@jax.custom_vjp
def entropy_with_z(logits, targets, z_loss):
    """Cross entropy and the penalty of its normaliser, with a gradient of its own."""
    return _entropy_forward(logits, targets, z_loss)[0]


def _entropy_forward(logits, targets, z_loss):
    normaliser = jax.nn.logsumexp(logits, -1)
    penalty = z_loss * normaliser**2
    value = normaliser - (targets * logits).sum(-1) + penalty
    return (value, penalty), (logits, targets, z_loss, normaliser)


def _entropy_backward(kept, cotangents):
    logits, targets, z_loss, normaliser = kept
    softmax = jnp.exp(logits - normaliser[..., None])
    grads = (1 + 2 * z_loss * normaliser)[..., None] * softmax - targets
    return cotangents[0][..., None] * grads, None, None


entropy_with_z.defvjp(_entropy_forward, _entropy_backward)


@situation("google-research/t5x:t5x/losses.py")
def z_loss():
    """Cross entropy with a z-loss, label smoothing and a gradient by `custom_vjp`; the penalty is logged."""
    model, ids = Causal(), tokens()
    params = model.init(jax.random.key(0), ids)["params"]

    def loss(params, ids):
        logits = model.apply({"params": params}, ids)[:, :-1]
        targets = optax.smooth_labels(jax.nn.one_hot(ids[:, 1:], WORDS), 0.1)
        value, penalty = entropy_with_z(logits, targets, 1e-2)
        return value.mean(), penalty.mean()

    def step(state, ids):
        of_loss = mpmd.accumulate_gradients(loss, MICROBATCHES, has_aux=True)
        (value, penalty), grads = of_loss(state[0], ids)
        return updated(*state, grads), {"loss": value, "z_loss": penalty.mean()}

    return UserStep(step, (params, ADAM.init(params)), (ids,), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google/flax:examples/lm1b/train.py")
def weights_of_padding():
    """Padding has weight 0, and sums are divided by the weights of the whole batch; tied embeddings."""
    model, ids = Causal(tied=True), tokens()
    ids = jnp.where(jnp.arange(ids.shape[1]) < 2 + jnp.arange(8)[:, None] % 5, ids, 0)
    params = model.init(jax.random.key(0), ids)["params"]

    def loss(params, ids):
        weights = (ids[:, 1:] > 0).astype(jnp.float32)
        losses = cross_entropy(model.apply({"params": params}, ids)[:, :-1], ids[:, 1:])
        return (losses * weights).sum(), weights.sum()

    def step(state, ids):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES, weighted=True)(state[0], ids)
        return updated(*state, grads), value

    return UserStep(step, (params, ADAM.init(params)), (ids,), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google/flax:examples/wmt/train.py")
def packed_segments():
    """Several sentences in a row: segment ids mask attention and the loss."""
    model, ids = Causal(), tokens(length=8)
    segments = jnp.sort(jax.random.randint(jax.random.key(4), ids.shape, 1, 4), axis=1)

    def mask(segments):
        return nn.combine_masks(
            nn.make_attention_mask(segments, segments, jnp.equal), nn.make_causal_mask(segments)
        )

    params = model.init(jax.random.key(0), ids, mask(segments))["params"]

    def loss(params, ids, segments):
        logits = model.apply({"params": params}, ids, mask(segments))[:, :-1]
        same = (segments[:, 1:] == segments[:, :-1]).astype(jnp.float32)
        return (cross_entropy(logits, ids[:, 1:]) * same).sum(), same.sum()

    def step(state, ids, segments):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES, weighted=True)(state[0], ids, segments)
        return updated(*state, grads), value

    return UserStep(step, (params, ADAM.init(params)), (ids, segments), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-research/big_vision:big_vision/utils.py")
def mixup():
    """Mixup in the step: rows are mixed with the rows before them, by a drawn factor."""
    params, _, (x, labels) = classified()

    def loss(params, x, targets):
        return (
            optax.sigmoid_binary_cross_entropy(Residual().apply({"params": params}, x), targets)
            .sum(-1)
            .mean()
        )

    def step(state, x, labels):
        params, moments, key = state
        key, own = jax.random.split(key)
        a = jax.random.beta(own, 0.5, 0.5)
        a = jnp.maximum(a, 1 - a)

        def mix(t):
            return a * t + (1 - a) * jnp.roll(t, shift=1, axis=0)

        batch = mix(x), mix(jax.nn.one_hot(labels, 5))
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
        return (*updated(params, moments, grads), key), value

    state = (params, ADAM.init(params), jax.random.key(8))
    return UserStep(step, state, (x, labels), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-research/big_vision:big_vision/trainers/proj/distill/distill.py")
def distillation():
    """A frozen teacher beside a student: the divergence of their logits at a temperature."""
    student, _, (x, _) = classified()
    teacher = classified(Residual())[0]

    def apply(params, x):
        return Residual().apply({"params": params}, x)

    def loss(params, x):
        wanted = jax.nn.log_softmax(jax.lax.stop_gradient(apply(params["teacher"], x)) / 2)
        got = jax.nn.log_softmax(apply(params["student"], x) / 2)
        return 4 * (jnp.exp(wanted) * (wanted - got)).sum(-1).mean()

    def step(state, x):
        params, moments = state

        def student(student, x):
            return loss({**params, "student": student}, x)

        value, grads = mpmd.accumulate_gradients(student, MICROBATCHES)(params["student"], x)
        new, moments = updated(params["student"], moments, grads)
        return ({**params, "student": new}, moments), value

    teacher = jax.tree.map(lambda w: w + 0.3, teacher)
    state = ({"student": student, "teacher": teacher}, ADAM.init(student))
    return UserStep(step, state, (x,), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-research/big_vision:big_vision/trainers/proj/image_text/siglip.py")
def sigmoid_contrast():
    """Two towers, a learnt temperature and bias, and a loss over all pairs of the batch."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "image": dense(keys[0], WIDTH, 16, WIDTH),
        "text": dense(keys[1], WIDTH, 16, WIDTH),
        "t": jnp.log(10.0),
        "b": jnp.float32(-10.0),
    }
    images, texts = jax.random.normal(keys[2], (2, 8, WIDTH))

    def unit(x):
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-8)

    def loss(params, images, texts):
        image, text = unit(multilayer(params["image"], images)), unit(multilayer(params["text"], texts))
        logits = image @ text.T * jnp.exp(params["t"]) + params["b"]
        return -jax.nn.log_sigmoid((2 * jnp.eye(8) - 1) * logits).sum(-1).mean()

    def step(state, images, texts):
        value, grads = jax.value_and_grad(mpmd.staged(loss))(state[0], images, texts)
        return updated(*state, grads), (value, state[0]["t"])

    stages = mpmd.by_parameters(r"(image|text)/", first="image", last="text")
    return UserStep(step, (params, ADAM.init(params)), (images, texts), stages)


@situation("PredictiveIntelligenceLab/jaxpi:jaxpi/models.py")
def weights_by_gradient_norms():
    """A differential equation: derivatives of the network in the loss, terms weighted by their gradients."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    params = {f"layer_{n}": jax.random.normal(k, (8, 8)) / 3 for n, k in enumerate(keys[2:])}
    params |= {"first": jax.random.normal(keys[0], (2, 8)), "last": jax.random.normal(keys[1], (8, 1))}

    def u(params, t, x):
        h = jnp.tanh(jnp.stack([t, x]) @ params["first"])
        for number in range(LAYERS):
            h = jnp.tanh(h @ params[f"layer_{number}"])
        return (h @ params["last"])[0]

    def residual(params, t, x):
        u_t, u_x = jax.grad(u, (1, 2))(params, t, x)
        u_xx = jax.grad(jax.grad(u, 2), 2)(params, t, x)
        return u_t + u(params, t, x) * u_x - 0.01 * u_xx

    def losses(params, t, x):
        start = jax.vmap(u, (None, None, 0))(params, 0.0, x) + jnp.sin(jnp.pi * x)
        inside = jax.vmap(residual, (None, 0, 0))(params, t, x)
        return {"ics": (start**2).mean(), "res": (inside**2).mean()}

    def step(state, t, x):
        params, moments, weights = state
        norms = {name: optax.tree.norm(g) for name, g in jax.jacrev(losses)(params, t, x).items()}
        mean = sum(norms.values()) / len(norms)
        weights = {name: 0.9 * weights[name] + 0.1 * mean / (norms[name] + 1e-5 * mean) for name in norms}

        def loss(params, t, x):
            of_terms = losses(params, t, x)
            return sum(jax.lax.stop_gradient(weights[name]) * of_terms[name] for name in of_terms)

        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, t, x)
        return (*updated(params, moments, grads), weights), (value, weights)

    t, x = jax.random.uniform(jax.random.key(1), (2, 8))
    state = (params, ADAM.init(params), {"ics": jnp.float32(1), "res": jnp.float32(1)})
    return UserStep(step, state, (t, x), mpmd.by_parameters(r"layer_(\d+)"))


class Routed(nn.Module):
    """Tokens to two of four experts, by a capacity, with the loss that balances them."""

    @nn.compact
    def __call__(self, x):
        probabilities = jax.nn.softmax(nn.Dense(4, use_bias=False, name="router")(x))
        gates, chosen = jax.lax.top_k(probabilities, 2)
        routed = jax.nn.one_hot(chosen, 4)
        order = jnp.cumsum(routed.reshape(-1, 4), 0).reshape(routed.shape) * routed
        kept = routed * (order <= 8)
        combine = (kept * gates[..., None]).sum(-2)
        up = self.param("up", nn.initializers.lecun_normal(), (4, WIDTH, 2 * WIDTH))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 2 * WIDTH, WIDTH))
        y = jnp.einsum("bth,ehd,bte->btd", jax.nn.relu(jnp.einsum("btd,edh->bth", x, up)), down, combine)
        balance = 4 * (routed.mean((0, 1, 2)) * probabilities.mean((0, 1))).sum()
        return x + y, balance


class RoutedModel(nn.Module):
    """Four layers of experts."""

    @nn.compact
    def __call__(self, ids):
        x, balance = nn.Embed(WORDS, WIDTH, name="embed")(ids), 0.0
        for number in range(LAYERS):
            x, of_layer = Routed(name=f"layer_{number}")(x)
            balance += of_layer
        return nn.Dense(WORDS, name="head")(x), balance


@situation("pytorch/torchtitan#2061")
def balanced_experts():
    """A mixture of experts with capacity, whose balancing loss is added up over all stages."""
    model, ids = RoutedModel(), tokens()
    params = model.init(jax.random.key(0), ids)["params"]

    def loss(params, ids):
        logits, balance = model.apply({"params": params}, ids)
        value = cross_entropy(logits[:, :-1], ids[:, 1:]).mean()
        return value + 1e-2 * balance, {"cross_entropy": value, "balance": balance}

    def step(state, ids):
        of_loss = mpmd.accumulate_gradients(loss, MICROBATCHES, has_aux=True)
        (value, parts), grads = of_loss(state[0], ids)
        return updated(*state, grads), {"loss": value, **jax.tree.map(jnp.mean, parts)}

    return UserStep(step, (params, ADAM.init(params)), (ids,), mpmd.by_parameters(r"layer_(\d+)"))


@situation("eric-mitchell/direct-preference-optimization:trainers.py")
def preferences():
    """Direct preference optimisation: chosen and rejected rows through a policy and a frozen reference."""
    model, ids = Causal(), tokens(rows=16)
    params = model.init(jax.random.key(0), ids)["params"]
    reference = jax.tree.map(lambda w: 0.9 * w, params)
    chosen, rejected = ids[:8], ids[8:]

    def score(params, ids):
        logits = jax.nn.log_softmax(model.apply({"params": params}, ids)[:, :-1])
        return jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0].sum(-1)

    def step(state, chosen, rejected):
        params, moments, reference = state

        def loss(params, chosen, rejected):
            ids = jnp.concatenate([chosen, rejected])
            gained = score(params, ids) - jax.lax.stop_gradient(score(reference, ids))
            better, worse = jnp.split(gained, 2)
            return -jax.nn.log_sigmoid(0.1 * (better - worse)).mean(), (better > worse).mean()

        of_loss = mpmd.accumulate_gradients(loss, MICROBATCHES, has_aux=True)
        (value, accuracy), grads = of_loss(params, chosen, rejected)
        return (*updated(params, moments, grads), reference), (value, accuracy.mean())

    state = (params, ADAM.init(params), reference)
    return UserStep(step, state, (chosen, rejected), mpmd.by_parameters(r"layer_(\d+)"))
