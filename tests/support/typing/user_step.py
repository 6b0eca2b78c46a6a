"""A step as a user writes it, with types: a type checker finds nothing to say."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

Params = dict[str, jax.Array]

topology = mpmd.make_topology({"m0": 1, "m1": 1})
config = mpmd.make_config(topology, {"encode": "m0", "decode": "m1"}, schedule="1f1b")


@mpmd.named_computation(name="encode")
def encode(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def decode(w: jax.Array, h: jax.Array) -> jax.Array:
    return mpmd.named_tensor(jnp.mean((h @ w) ** 2), name="loss")


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    h = encode(params["encode"], x)
    return mpmd.named_computation(decode, name="decode")(params["decode"], h)


@mpmd.jit(config, donate_argnums=0)
def train_step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
    loss, grads = mpmd.accumulate_gradients(loss_fn, num_microbatches=4)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def plain_step(params: Params, *, x: jax.Array) -> jax.Array:
    return loss_fn(params, x)


def use(params: Params, x: jax.Array) -> float:
    lowered: mpmd.Lowered = train_step.lower(params, jax.ShapeDtypeStruct((8, 4), np.float32))
    compiled: mpmd.Compiled = lowered.compile(runtime=mpmd.RuntimeOptions())
    text: str = lowered.as_text("mpmd") + compiled.as_text("hlo")
    params, loss = train_step(params, x)
    jitted: mpmd.Jitted = mpmd.jit(plain_step, config, static_argnames=())
    again: jax.Array = mpmd.jit(plain_step, config)(params, x=x)
    jitted.clear_cache()
    peaks = {mesh: memory.peak_bytes for mesh, memory in compiled.memory_analysis().items()}
    fetched = mpmd.fetch(params)
    return float(loss) + float(again) + len(text) + sum(peaks.values()) + len(fetched)
