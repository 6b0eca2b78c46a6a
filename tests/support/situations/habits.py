"""Habits of training loops: what a step does beside gradients and an update."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import dynamic_scale, train_state

import mpmd
from tests.support.situations import UserStep, situation
from tests.support.situations.models import (
    LAYERS,
    MICROBATCHES,
    WIDTH,
    WORDS,
    Causal,
    Residual,
    classified,
    cross_entropy,
    tokens,
)


class Normalised(nn.Module):
    """Dense, batch norm, dropout, four times."""

    @nn.compact
    def __call__(self, x, train):
        for number in range(LAYERS):
            x = nn.Dense(WIDTH, name=f"layer_{number}")(x)
            x = nn.BatchNorm(use_running_average=not train, name=f"norm_{number}")(x)
            x = nn.relu(nn.Dropout(0.2, deterministic=not train)(x))
        return nn.Dense(5, name="head")(x)


class State(train_state.TrainState):
    """With a key and statistics."""

    key: Any = None
    batch_stats: Any = None
    average: Any = None
    scale: Any = None


def state_of(model, tx, *args, **more):
    """A `TrainState` whose counter is an array."""
    variables = model.init(jax.random.key(0), *args)
    stats = variables.get("batch_stats")
    state = State.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=stats,
        key=jax.random.key(3),
        **more,
    )
    return state.replace(step=jnp.int32(0))


@situation("google/flax#2419")
def batch_norm_and_dropout():
    """A `TrainState` with `batch_stats` and a key that is split in the step."""
    x, labels = classified()[2]
    state = state_of(Normalised(), optax.adam(1e-2), x, False)

    def step(state, x, labels):
        key, own = jax.random.split(state.key)

        def loss(params, x, labels):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(
                variables, x, True, rngs={"dropout": own}, mutable=["batch_stats"]
            )
            return cross_entropy(logits, labels).mean(), (logits, changed["batch_stats"])

        of_loss = jax.value_and_grad(mpmd.staged(loss), has_aux=True)
        (value, (logits, stats)), grads = of_loss(state.params, x, labels)
        state = state.apply_gradients(grads=grads, batch_stats=stats, key=key)
        return state, {"loss": value, "accuracy": (logits.argmax(-1) == labels).mean()}

    return UserStep(step, state, (x, labels), mpmd.by_parameters(r"(?:layer|norm)_(\d+)"))


@situation("google/flax:examples/imagenet/train.py")
def dynamic_loss_scale():
    """flax's `DynamicScale` with half precision: a step that overflows keeps the old state."""
    model = Residual(dtype=jnp.float16)
    x, labels = classified()[2]
    scale = dynamic_scale.DynamicScale(growth_interval=2, scale=jnp.float32(2.0**20))
    state = state_of(model, optax.sgd(0.1, 0.9), x, scale=scale)

    def step(state, x, labels):
        def loss(params):
            return cross_entropy(state.apply_fn({"params": params}, x), labels).mean()

        scale, finite, value, grads = state.scale.value_and_grad(mpmd.staged(loss))(state.params)
        new = state.apply_gradients(grads=grads, scale=scale)

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        new = new.replace(
            params=keep(new.params, state.params), opt_state=keep(new.opt_state, state.opt_state)
        )
        return new, {"loss": value, "scale": scale.scale, "finite": finite}

    stages = mpmd.by_parameters(r"layer_(\d+)")
    return UserStep(step, state, (x, labels), stages, steps=4, tolerance=2e-3)


@situation("AI-Hypercomputer/maxtext#276")
def key_of_the_step():
    """The key of dropout is `fold_in(key, step)`, split for the microbatches."""
    model, ids = Causal(dropout=0.2), tokens()
    state = state_of(model, optax.adamw(1e-2, eps=1e-3), ids)

    def step(state, ids):
        keys = jax.random.split(jax.random.fold_in(state.key, state.step), MICROBATCHES)

        def loss(params, ids, keys):
            logits = state.apply_fn({"params": params}, ids, rngs={"dropout": keys[0]})
            return cross_entropy(logits[:, :-1], ids[:, 1:]).mean()

        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state.params, ids, keys)
        return state.apply_gradients(grads=grads), value

    return UserStep(step, state, (ids,), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-research/vdm:train_state.py")
def average_of_parameters():
    """An exponential moving average of the parameters in the state, evaluated in the same step."""
    params, loss, (x, labels) = classified()
    state = state_of(Residual(), optax.adam(1e-2), x, average=params)

    def step(state, x, labels):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state.params, x, labels)
        state = state.apply_gradients(grads=grads)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, state.params)
        return state.replace(average=average), (value, loss(average, x, labels))

    return UserStep(step, state, (x, labels), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-research/big_vision:big_vision/train.py")
def logged_norms():
    """Norms of gradients, parameters and updates, of all and of each leaf, as a dictionary of metrics."""
    params, loss, batch = classified()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def step(state, x, labels):
        params, moments = state
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        updates, moments = tx.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        norms = {
            "grads": optax.tree.norm(grads),
            "params": optax.tree.norm(params),
            "updates": optax.tree.norm(updates),
        }
        each = {
            jax.tree_util.keystr(path): jnp.linalg.norm(g) for path, g in jax.tree.leaves_with_path(grads)
        }
        return (params, moments), {"loss": value, **norms, **each}

    return UserStep(step, (params, tx.init(params)), batch, mpmd.by_parameters(r"layer_(\d+)"))


@situation("luchris429/purejaxrl:purejaxrl/dqn.py")
def callback_with_metrics():
    """`jax.debug.callback` with the metrics of each step."""
    params, loss, batch = classified()
    tx, seen = optax.adam(1e-2), []

    def step(state, x, labels):
        params, moments, count = state
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        jax.debug.callback(
            lambda metrics: seen.append(metrics["count"] + round(float(metrics["loss"]), 3)),
            {"count": count, "loss": value},
        )
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, count + 1), value

    state = (params, tx.init(params), jnp.int32(0))
    return UserStep(step, state, batch, mpmd.by_parameters(r"layer_(\d+)"), seen=seen)


@situation("jax-ml/jax#16637")
def callback_in_a_stage():
    """`jax.debug.callback` in each layer of a model whose loss is differentiated."""
    x, labels = classified()[2]
    seen = []

    def forward(params, x):
        for number in range(LAYERS):
            x = jnp.tanh(x @ params[f"layer_{number}"])
            jax.debug.callback(lambda most: seen.append(round(float(most), 4)), jnp.abs(x).max())
        return x @ params["head"]

    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = {f"layer_{n}": jax.random.normal(k, (WIDTH, WIDTH)) / 3 for n, k in enumerate(keys[1:])}
    params["head"] = jax.random.normal(keys[0], (WIDTH, 5))

    def step(params, x, labels):
        def loss(params, x, labels):
            return cross_entropy(forward(params, x), labels).mean()

        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return UserStep(step, params, (x, labels), mpmd.by_parameters(r"layer_(\d+)"), seen=seen)


class DroppingBlock(nnx.Module):
    """A residual block with dropout, whose key is state of the module."""

    def __init__(self, rngs):
        self.norm, self.dense = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.gelu(self.dense(self.norm(x))))


class DroppingModel(nnx.Module):
    """Blocks in a list."""

    def __init__(self, rngs):
        self.layers = nnx.List([DroppingBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@situation("google/flax#5116")
def nnx_optimizer():
    """`nnx.Optimizer`, merged and split in the step, with the keys of dropout in the model's state."""
    model = DroppingModel(nnx.Rngs(0))
    definition, state = nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)))

    def step(state, x, labels):
        model, optimizer = nnx.merge(definition, state)
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, x, labels):
            whole = nnx.merge(graph, params, rest, copy=True)
            value = cross_entropy(whole(x), labels).mean()
            return value, nnx.split(whole, nnx.Param, ...)[2]

        (value, rest), grads = jax.value_and_grad(mpmd.staged(loss), has_aux=True)(params, x, labels)
        nnx.update(model, rest)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], value

    return UserStep(step, state, classified()[2], mpmd.by_parameters(r"layers/(\d+)"))


@situation("borisdayma/dalle-mini:tools/train/train.py")
def accumulation_by_hand():
    """Gradients accumulated by the step's own `fori_loop` over microbatches, with a key in the carry."""
    model, ids = Causal(dropout=0.1), tokens()
    state = state_of(model, optax.adam(1e-2, eps=1e-3), ids)

    def step(state, ids):
        def loss(params, ids, key):
            logits = state.apply_fn({"params": params}, ids, rngs={"dropout": key})
            return cross_entropy(logits[:, :-1], ids[:, 1:]).mean()

        def of_microbatch(number, carry):
            total, key = carry
            key, own = jax.random.split(key)
            value, grads = jax.value_and_grad(mpmd.staged(loss))(state.params, microbatches[number], own)
            return jax.tree.map(jnp.add, total, (value, grads)), key

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
        microbatches = ids.reshape(MICROBATCHES, -1, ids.shape[1])
        (value, grads), key = jax.lax.fori_loop(0, MICROBATCHES, of_microbatch, (zeros, state.key))
        grads = jax.tree.map(lambda g: g / MICROBATCHES, grads)
        return state.apply_gradients(grads=grads, key=key), value / MICROBATCHES

    return UserStep(step, state, (ids,), mpmd.by_parameters(r"layer_(\d+)"))


@situation("davisyoshida/lorax:examples/simple.py")
def low_rank_adaptation():
    """LoRA: a frozen model, trained factors of its kernels, merged in the loss."""
    frozen, loss, batch = classified()
    kernels = {name: layer["kernel"] for name, layer in frozen.items() if name.startswith("layer")}
    key = jax.random.key(5)
    lora = {
        name: {"a": jax.random.normal(key, (w.shape[0], 2)) / 4, "b": jnp.zeros((2, w.shape[1]))}
        for name, w in kernels.items()
    }
    tx = optax.adam(1e-2)

    def step(state, x, labels):
        frozen, lora, moments = state

        def adapted(lora, x, labels):
            params = {
                name: {**layer, "kernel": layer["kernel"] + lora[name]["a"] @ lora[name]["b"]}
                if name in lora
                else layer
                for name, layer in frozen.items()
            }
            return loss(params, x, labels)

        value, grads = mpmd.accumulate_gradients(adapted, MICROBATCHES)(lora, x, labels)
        updates, moments = tx.update(grads, moments)
        return (frozen, optax.apply_updates(lora, updates), moments), value

    return UserStep(step, (frozen, lora, tx.init(lora)), batch, mpmd.by_parameters(r"layer_(\d+)"), steps=3)


@situation("srush/annotated-s4:s4/train.py")
def rates_by_names():
    """`optax.multi_transform`: names of parameters choose their rate and decay."""
    params, loss, batch = classified()

    def label(path, _):
        return "slow" if "bias" in str(path[-1]) else "regular"

    labels = jax.tree_util.tree_map_with_path(label, params)
    tx = optax.multi_transform({"slow": optax.adam(1e-3), "regular": optax.adamw(1e-2)}, labels)

    def step(state, x, labels):
        params, moments = state
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return UserStep(step, (params, tx.init(params)), batch, mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-deepmind/dm-haiku:examples/mnist_pruning.py")
def pruned_weights():
    """Magnitude pruning in the step: masks from a quantile of each kernel, on a schedule of steps."""
    params, loss, batch = classified()
    tx = optax.adam(1e-2)

    def prune(params, count):
        fraction = 0.5 * jnp.minimum(count / 3, 1)

        def masked(w):
            return jnp.where(jnp.abs(w) >= jnp.quantile(jnp.abs(w), fraction), w, 0)

        return jax.tree.map(lambda w: masked(w) if w.ndim > 1 else w, params)

    def step(state, x, labels):
        params, moments, count = state
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        updates, moments = tx.update(grads, moments, params)
        params = prune(optax.apply_updates(params, updates), count)
        return (params, moments, count + 1), value

    state = (params, tx.init(params), jnp.int32(0))
    return UserStep(step, state, batch, mpmd.by_parameters(r"layer_(\d+)"))


@situation("apple/axlearn#1171")
def nested_checkpoints():
    """A checkpoint with a policy around a scan over layers, each of which has a checkpoint of its own."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embed": jax.random.normal(keys[0], (WORDS, WIDTH)),
        "layers": {
            "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 2 * WIDTH)) / 3,
            "down": jax.random.normal(keys[2], (LAYERS, 2 * WIDTH, WIDTH)) / 4,
        },
    }

    def loss(params, ids):
        layer = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None), policy=policy)
        stack = jax.checkpoint(lambda x, w: jax.lax.scan(layer, x, w)[0], policy=policy)
        x = stack(params["embed"][ids], params["layers"])
        return cross_entropy(x[:, :-1] @ params["embed"].T, ids[:, 1:]).mean()

    def step(params, ids):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, ids)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return UserStep(step, params, (tokens(),), mpmd.split("layers"))
