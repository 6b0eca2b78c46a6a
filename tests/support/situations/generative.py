"""Generative and self-supervised models of images."""

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
    Residual,
    dense,
    multilayer,
    updated,
)


def images():
    """Eight flat ones."""
    return jax.random.normal(jax.random.key(1), (8, WIDTH))


@situation("google/flax:examples/vae/train.py")
def variational_autoencoder():
    """Encoder and decoder, a sample between them, reconstruction and divergence as two metrics."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"encoder": dense(keys[0], WIDTH, 16, 8), "decoder": dense(keys[1], 4, 16, WIDTH)}

    def loss(params, x, keys):
        mean, log_variance = jnp.split(multilayer(params["encoder"], x), 2, -1)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(keys[0], mean.shape)
        logits = multilayer(params["decoder"], z)
        bce = optax.sigmoid_binary_cross_entropy(logits, jax.nn.sigmoid(x)).sum(-1).mean()
        kld = -0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).sum(-1).mean()
        return bce + kld, {"bce": bce, "kld": kld}

    def step(state, x):
        params, moments, key = state
        key, own = jax.random.split(key)
        of_loss = mpmd.accumulate_gradients(loss, MICROBATCHES, has_aux=True)
        (value, parts), grads = of_loss(params, x, jax.random.split(own, MICROBATCHES))
        return (*updated(params, moments, grads), key), {"loss": value, **jax.tree.map(jnp.mean, parts)}

    return UserStep(step, (params, ADAM.init(params), jax.random.key(3)), (images(),), "auto")


@situation("google/flax#359")
def two_players():
    """A generative adversarial network: two losses, two optimizers, one step."""
    keys = jax.random.split(jax.random.key(0), 2)
    generator, discriminator = dense(keys[0], 4, 16, 16, WIDTH), dense(keys[1], WIDTH, 16, 16, 1)

    def score(weights, x):
        return multilayer(weights, x)[:, 0]

    real_or_not = optax.sigmoid_binary_cross_entropy

    def of_discriminator(weights, real, fake):
        return (real_or_not(score(weights, real), 1.0) + real_or_not(score(weights, fake), 0.0)).mean()

    def step(state, x):
        generator, of_g, discriminator, of_d, key = state
        key, own = jax.random.split(key)
        noise = jax.random.normal(own, (8, 4))
        fake = multilayer(generator, noise)
        d_loss, grads = mpmd.accumulate_gradients(of_discriminator, MICROBATCHES)(discriminator, x, fake)
        discriminator, of_d = updated(discriminator, of_d, grads)

        def of_generator(weights, noise):
            return real_or_not(score(discriminator, multilayer(weights, noise)), 1.0).mean()

        g_loss, grads = mpmd.accumulate_gradients(of_generator, MICROBATCHES)(generator, noise)
        generator, of_g = updated(generator, of_g, grads)
        return (generator, of_g, discriminator, of_d, key), {"generator": g_loss, "discriminator": d_loss}

    state = (generator, ADAM.init(generator), discriminator, ADAM.init(discriminator), jax.random.key(3))
    return UserStep(step, state, (images(),), mpmd.by_parameters(r"^(\d)"))


@situation("google-deepmind/dm-haiku:examples/vqvae_example.ipynb")
def vector_quantised():
    """A codebook of moving averages in the state: nearest code, straight-through gradient."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"encoder": dense(keys[0], WIDTH, 16, 4), "decoder": dense(keys[1], 4, 16, WIDTH)}
    codebook = {"sizes": jnp.ones(6), "sums": jax.random.normal(keys[2], (6, 4))}

    def loss(params, x, codes):
        z = multilayer(params["encoder"], x)
        nearest = ((z[:, None] - codes) ** 2).sum(-1).argmin(-1)
        commitment = ((jax.lax.stop_gradient(codes[nearest]) - z) ** 2).mean()
        quantised = z + jax.lax.stop_gradient(codes[nearest] - z)
        value = ((multilayer(params["decoder"], quantised) - x) ** 2).mean()
        return value + 0.25 * commitment, (z, nearest)

    def step(state, x):
        params, moments, codebook = state
        codes = codebook["sums"] / codebook["sizes"][:, None]
        of_loss = jax.value_and_grad(mpmd.staged(loss), has_aux=True)
        (value, (z, nearest)), grads = of_loss(params, x, codes)
        chosen = jax.nn.one_hot(nearest, 6)
        codebook = {
            "sizes": 0.9 * codebook["sizes"] + 0.1 * chosen.sum(0),
            "sums": 0.9 * codebook["sums"] + 0.1 * chosen.T @ z,
        }
        usage = chosen.mean(0)
        perplexity = jnp.exp(-(usage * jnp.log(usage + 1e-10)).sum())
        return (*updated(params, moments, grads), codebook), (value, perplexity)

    stages = mpmd.by_parameters(r"encoder/(\d)", last="decoder")
    return UserStep(step, (params, ADAM.init(params), codebook), (images(),), stages)


class UNet(nn.Module):
    """Down, middle, up, with skip connections, group norm and an embedding of the time."""

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * jnp.exp(-jnp.arange(4.0))
        time = nn.Dense(8, name="time")(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        h = nn.Conv(8, (3, 3), name="down_0")(x)
        first = nn.swish(nn.GroupNorm(2, name="norm_0")(h + time[:, None, None]))
        h = nn.Conv(16, (3, 3), strides=2, name="down_1")(first)
        second = nn.swish(nn.GroupNorm(2, name="norm_1")(h))
        h = nn.swish(nn.Conv(16, (3, 3), name="mid_2")(second))
        h = nn.ConvTranspose(8, (3, 3), strides=(2, 2), name="up_3")(jnp.concatenate([h, second], -1))
        return nn.Conv(1, (3, 3), name="out_3")(jnp.concatenate([h, first], -1))


@situation("yiyixuxu/denoising-diffusion-flax:denoising_diffusion_flax/train.py")
def diffusion():
    """Denoising diffusion with a U-Net: times and noise drawn in the step, weights per time."""
    x = jax.random.normal(jax.random.key(2), (8, 4, 4, 1))
    params = UNet().init(jax.random.key(0), x, jnp.zeros(8))["params"]
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.2, 20))

    def loss(params, noisy, time, noise, weight):
        predicted = UNet().apply({"params": params}, noisy, time.astype(jnp.float32))
        return (jnp.abs(predicted - noise).mean((1, 2, 3)) * weight).mean()

    def step(state, x):
        params, moments, average, key = state
        key, one, two = jax.random.split(key, 3)
        time = jax.random.randint(one, (8,), 0, 20)
        noise, alpha = jax.random.normal(two, x.shape), kept[time]
        noisy = jnp.sqrt(alpha)[:, None, None, None] * x + jnp.sqrt(1 - alpha)[:, None, None, None] * noise
        weight = 1 / (1 + alpha / (1 - alpha))
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, noisy, time, noise, weight)
        params, moments = updated(params, moments, grads)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, params)
        return (params, moments, average, key), value

    state = (params, ADAM.init(params), params, jax.random.key(3))
    return UserStep(step, state, (x,), mpmd.by_parameters(r"(?:down|norm|mid|up|out)_(\d)"), tolerance=1e-4)


@situation("google-deepmind/deepmind-research:byol/byol_experiment.py")
def bootstrapped_targets():
    """Two views, an online network with a predictor, a target network that is its moving average."""
    keys = jax.random.split(jax.random.key(0), 2)
    online = {"layers": dense(keys[0], WIDTH, 16, 16, WIDTH), "predictor": dense(keys[1], WIDTH, 16, WIDTH)}

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def step(state, x):
        online, moments, target, key, count = state
        key, own = jax.random.split(key)
        views = x + 0.1 * jax.random.normal(own, (2, *x.shape))

        def loss(online, one, two):
            def predict(x):
                return unit(multilayer(online["predictor"], multilayer(online["layers"], x)))

            def wanted(x):
                return jax.lax.stop_gradient(unit(multilayer(target, x)))

            return (2 - 2 * (predict(one) * wanted(two) + predict(two) * wanted(one)).sum(-1)).mean()

        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(online, *views)
        online, moments = updated(online, moments, grads)
        rate = 1 - 0.1 * (jnp.cos(jnp.pi * count / 10) + 1) / 2
        target = jax.tree.map(lambda t, o: rate * t + (1 - rate) * o, target, online["layers"])
        return (online, moments, target, key, count + 1), value

    state = (online, ADAM.init(online), online["layers"], jax.random.key(3), jnp.int32(0))
    return UserStep(step, state, (images(),), mpmd.by_parameters(r"layers/(\d)", last="predictor"))


@situation("facebookresearch/moco:moco/builder.py")
def queue_of_keys():
    """Momentum contrast: keys of earlier batches in a queue of the state, whose pointer goes around."""
    query = dense(jax.random.key(0), WIDTH, 16, 16, WIDTH)

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(query, x, keys, queue):
        q = unit(multilayer(query, x))
        logits = jnp.concatenate([(q * keys).sum(-1, keepdims=True), q @ queue.T], 1) / 0.07
        return -jax.nn.log_softmax(logits)[:, 0].mean()

    def step(state, x):
        query, moments, momentum, queue, pointer = state
        momentum = jax.tree.map(lambda k, q: 0.9 * k + 0.1 * q, momentum, query)
        keys = unit(multilayer(momentum, x[::-1]))

        def of_queue(query, x, keys):
            return loss(query, x, keys, queue)

        value, grads = mpmd.accumulate_gradients(of_queue, MICROBATCHES)(query, x, keys)
        queue = jax.lax.dynamic_update_slice(queue, keys, (pointer, 0))
        return (*updated(query, moments, grads), momentum, queue, (pointer + 8) % 24), value

    queue = unit(jax.random.normal(jax.random.key(5), (24, WIDTH)))
    state = (query, ADAM.init(query), query, queue, jnp.int32(0))
    return UserStep(step, state, (images(),), mpmd.by_parameters(r"^(\d)"), steps=4)


@situation("google-research/google-research:jaxnerf/train.py")
def coarse_and_fine():
    """A radiance field: a fine network at positions drawn from the weights of a coarse one."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"coarse": dense(keys[0], 3, 16, 4), "fine": dense(keys[1], 3, 16, 4)}

    def rendered(weights, origins, directions, at):
        points = origins[:, None] + at[..., None] * directions[:, None]
        raw = multilayer(weights, points)
        gaps = jnp.concatenate([at[:, 1:] - at[:, :-1], jnp.full_like(at[:, :1], 1e2)], -1)
        alpha = 1 - jnp.exp(-jax.nn.relu(raw[..., 3]) * gaps)
        through = jnp.cumprod(
            jnp.concatenate([jnp.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-6], -1), -1
        )
        weights = alpha * through
        return (weights[..., None] * jax.nn.sigmoid(raw[..., :3])).sum(1), weights

    def loss(params, origins, directions, colours, drawn):
        at = jnp.broadcast_to(jnp.linspace(1.0, 3.0, 8), (len(origins), 8))
        coarse, weights = rendered(params["coarse"], origins, directions, at)
        cdf = jnp.cumsum(weights + 1e-3, -1)
        found = jax.vmap(jnp.searchsorted)(cdf / cdf[:, -1:], drawn)
        more = jax.lax.stop_gradient(jnp.take_along_axis(at, jnp.clip(found, 0, 7), 1) + 0.01 * drawn)
        fine, _ = rendered(params["fine"], origins, directions, jnp.sort(jnp.concatenate([at, more], -1), -1))
        return ((coarse - colours) ** 2).mean() + ((fine - colours) ** 2).mean()

    def step(state, origins, directions, colours):
        params, moments, key = state
        key, own = jax.random.split(key)
        batch = origins, directions, colours, jax.random.uniform(own, (8, 4))
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
        return (*updated(params, moments, grads), key), (value, -10 * jnp.log10(value))

    batch = tuple(jax.random.normal(jax.random.key(4), (3, 8, 3)))
    stages = mpmd.by_parameters("(coarse|fine)", first="coarse", last="fine")
    return UserStep(step, (params, ADAM.init(params), jax.random.key(3)), batch, stages)


@situation("google-research/big_vision:big_vision/trainers/proj/jet/train.py")
def normalising_flow():
    """Affine couplings whose log-determinants are added up over the layers, in bits per dimension."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {f"layer_{n}": dense(k, WIDTH // 2, 16, WIDTH) for n, k in enumerate(keys)}

    def loss(params, x):
        total = 0.0
        for number in range(LAYERS):
            kept, changed = jnp.split(x[:, jnp.arange(WIDTH)[:: (-1) ** number]], 2, -1)
            shift, raw = jnp.split(multilayer(params[f"layer_{number}"], kept), 2, -1)
            log_scale = jax.nn.log_sigmoid(raw + 2)
            x = jnp.concatenate([kept, (changed + shift) * jnp.exp(log_scale)], -1)
            total += log_scale.sum(-1)
        normal = -0.5 * (x**2 + jnp.log(2 * jnp.pi)).sum(-1)
        return -((normal + total) / (WIDTH * jnp.log(2))).mean()

    def step(state, x):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state[0], x)
        return updated(*state, grads), value

    return UserStep(step, (params, ADAM.init(params)), (images(),), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-deepmind/alphafold:alphafold/model/modules.py")
def recycling():
    """The output is fed back: iterations without gradient in a loop whose length is data, then one with."""
    x = images()
    model = Residual(outputs=WIDTH)
    params = model.init(jax.random.key(0), x)["params"]

    def step(state, x):
        params, moments, iterations = state

        def apply(params, x, before):
            return model.apply({"params": params}, x + 0.1 * before)

        def body(_, before):
            return apply(params, x, before)

        before = jax.lax.stop_gradient(jax.lax.fori_loop(0, iterations, body, jnp.zeros_like(x)))

        def loss(params, x, before):
            return ((apply(params, x, before) - jnp.sin(x)) ** 2).mean()

        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, before)
        return (*updated(params, moments, grads), (iterations + 1) % 3), value

    state = (params, ADAM.init(params), jnp.int32(0))
    return UserStep(step, state, (x,), mpmd.by_parameters(r"layer_(\d+)"), steps=3)


@situation("google-research/big_vision:big_vision/models/bit.py")
def standardised_convolutions():
    """A residual network with group norm, whose kernels are standardised where they are used."""
    x = jax.random.normal(jax.random.key(2), (8, 4, 4, 3))
    labels = jnp.arange(8) % 5
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    params = {
        f"block_{n}": {"kernel": jax.random.normal(k, (3, 3, 8, 8)) / 8, "scale": jnp.ones(8)}
        for n, k in enumerate(keys[2:])
    }
    params |= {
        "root": jax.random.normal(keys[0], (3, 3, 3, 8)) / 5,
        "head": jax.random.normal(keys[1], (8, 5)),
    }

    def conv(x, kernel):
        kernel = (kernel - kernel.mean((0, 1, 2))) / jnp.sqrt(kernel.var((0, 1, 2)) + 1e-5)
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(x, scale):
        groups = x.reshape(*x.shape[:-1], 2, 4)
        mean, var = groups.mean((1, 2, 4), keepdims=True), groups.var((1, 2, 4), keepdims=True)
        return ((groups - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape) * scale

    def loss(params, x, labels):
        x = conv(x, params["root"])
        for number in range(LAYERS):
            block = params[f"block_{number}"]
            x = x + conv(jax.nn.relu(norm(x, block["scale"])), block["kernel"])
        return optax.softmax_cross_entropy_with_integer_labels(x.mean((1, 2)) @ params["head"], labels).mean()

    def step(state, x, labels):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(state[0], x, labels)
        return updated(*state, grads), value

    return UserStep(
        step, (params, ADAM.init(params)), (x, labels), mpmd.by_parameters(r"block_(\d+)"), tolerance=1e-4
    )
