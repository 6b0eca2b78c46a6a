"""Reinforcement learning: targets, several networks in a step, epochs in a scan, models of the world."""

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

ROWS, ACTIONS = 8, 3


def transitions():
    """Observations, actions, rewards, observations after them, ends."""
    keys = jax.random.split(jax.random.key(1), 3)
    before, after = jax.random.normal(keys[0], (2, ROWS, WIDTH))
    reward = jax.random.normal(keys[1], (ROWS,))
    return before, jnp.arange(ROWS) % ACTIONS, reward, after, (jnp.arange(ROWS) % 4 == 3).astype(jnp.float32)


q_network = Residual(outputs=ACTIONS)


def q_loss(params, target, before, action, reward, after, done):
    """The error of the chosen actions' values."""
    best = q_network.apply({"params": target}, after).max(-1)
    wanted = jax.lax.stop_gradient(reward + 0.9 * (1 - done) * best)
    got = jnp.take_along_axis(q_network.apply({"params": params}, before), action[:, None], -1)[:, 0]
    return ((got - wanted) ** 2).mean()


def q_state():
    """Parameters, moments, target, count."""
    params = q_network.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    return params, ADAM.init(params), jax.tree.map(lambda w: 0.9 * w, params), jnp.int32(0)


@situation("luchris429/purejaxrl:purejaxrl/dqn.py")
def target_network():
    """Q-learning whose target network becomes the network every second step, by a `lax.cond`."""

    def step(state, *batch):
        params, moments, target, count = state

        def loss(params, *batch):
            return q_loss(params, target, *batch)

        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
        params, moments = updated(params, moments, grads)

        def take(params, target):
            return optax.incremental_update(params, target, 0.95)

        target = jax.lax.cond(count % 2 == 1, take, lambda _, target: target, params, target)
        return (params, moments, target, count + 1), value

    return UserStep(step, q_state(), transitions(), mpmd.by_parameters(r"layer_(\d+)"), steps=4)


@situation("keraJLi/rejax#27")
def polyak_targets_on_a_schedule():
    """Both networks' parameters are averaged every `k` steps, chosen by `jnp.where` on the counter."""

    def step(state, *batch):
        params, moments, target, count = state

        def loss(params, *batch):
            return q_loss(params, target, *batch)

        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
        params, moments = updated(params, moments, grads)
        target = optax.periodic_update(params, target, count, 2)
        return (params, moments, target, count + 1), value

    return UserStep(step, q_state(), transitions(), mpmd.by_parameters(r"layer_(\d+)"), steps=3)


@situation(
    "luchris429/purejaxrl:purejaxrl/dqn.py",
    refused="is in the true branch of a lax.cond whose condition is not a constant",
)
def learning_in_a_branch():
    """The whole update is a branch of a `lax.cond` on the counter."""

    def step(state, *batch):
        def learn(state):
            params, moments, target, count = state

            def loss(params, *batch):
                return q_loss(params, target, *batch)

            value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
            return (*updated(params, moments, grads), target, count + 1), value

        def wait(state):
            return ((*state[:3], state[3] + 1), jnp.zeros(()))

        return jax.lax.cond(state[3] % 2 == 1, learn, wait, state)

    return UserStep(step, q_state(), transitions(), mpmd.by_parameters(r"layer_(\d+)"))


class ActorCritic(nn.Module):
    """Two towers."""

    @nn.compact
    def __call__(self, x):
        actor = critic = x
        for number in range(LAYERS):
            actor = nn.tanh(nn.Dense(WIDTH, name=f"actor_{number}")(actor))
            critic = nn.tanh(nn.Dense(WIDTH, name=f"critic_{number}")(critic))
        return nn.Dense(ACTIONS, name="policy")(actor), nn.Dense(1, name="value")(critic)[..., 0]


@situation("luchris429/purejaxrl:purejaxrl/ppo.py")
def epochs_of_minibatches():
    """PPO: advantages by a reverse scan, epochs and shuffled minibatches in two scans, an update in each."""
    model = ActorCritic()
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
    observations = jax.random.normal(jax.random.key(1), (4, ROWS, WIDTH))
    params = model.init(jax.random.key(0), observations[0])["params"]
    action = jnp.arange(4 * ROWS).reshape(4, ROWS) % ACTIONS
    reward = jnp.sin(jnp.arange(4.0 * ROWS)).reshape(4, ROWS)

    def log_of(logits, action):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]

    def loss(params, seen, action, old_log, old_value, advantage, target):
        logits, value = model.apply({"params": params}, seen)
        clipped = old_value + jnp.clip(value - old_value, -0.2, 0.2)
        of_value = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
        ratio = jnp.exp(log_of(logits, action) - old_log)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        of_actor = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
        return of_actor + 0.5 * of_value - 0.01 * entropy, (of_value, of_actor, entropy)

    def step(state, observations, action, reward):
        logits, values = model.apply({"params": state[0]}, observations)

        def backwards(carry, now):
            gae, after = carry
            reward, value = now
            gae = reward + 0.9 * after - value + 0.9 * 0.95 * gae
            return (gae, value), gae

        _, advantages = jax.lax.scan(backwards, (jnp.zeros(ROWS), values[-1]), (reward, values), reverse=True)
        flat = jax.tree.map(
            lambda t: t.reshape(-1, *t.shape[2:]), (observations, action, logits, values, advantages)
        )
        rows = flat[0], flat[1], log_of(flat[2], flat[1]), flat[3], flat[4], flat[3] + flat[4]

        def of_minibatch(state, rows):
            of_loss = jax.value_and_grad(mpmd.staged(loss), has_aux=True)
            found, grads = of_loss(state[0], *rows)
            return updated(*state, grads, tx), found

        def epoch(carry, _):
            state, key = carry
            key, own = jax.random.split(key)
            order = jax.random.permutation(own, 4 * ROWS)
            minibatches = jax.tree.map(lambda t: t[order].reshape(2, -1, *t.shape[1:]), rows)
            state, found = jax.lax.scan(of_minibatch, state, minibatches)
            return (state, key), found

        ((params, moments), key), found = jax.lax.scan(epoch, (state[:2], state[2]), None, 2)
        return (params, moments, key), found

    state = (params, tx.init(params), jax.random.key(3))
    stages = mpmd.by_parameters(r"(?:actor|critic)_(\d+)", last="policy|value")
    return UserStep(step, state, (observations, action, reward), stages, tolerance=1e-4)


@situation("ikostrikov/jaxrl:jaxrl/agents/sac/sac_learner.py")
def soft_actor_critic():
    """Three losses and optimizers, each with the new parameters of the others; twin critics by `vmap`."""
    keys = jax.random.split(jax.random.key(0), 3)
    actor = dense(keys[0], WIDTH, 16, 16, 4)
    critic = jax.vmap(lambda key: jnp.stack(dense(key, 10, 10, 10, 10)))(jax.random.split(keys[1]))
    before, _, reward, after, done = transitions()
    action = jnp.tanh(jax.random.normal(keys[2], (ROWS, 2)))

    def act(actor, seen, noise):
        mean, log_std = jnp.split(multilayer(actor, seen), 2, -1)
        action = jnp.tanh(mean + jnp.exp(jnp.clip(log_std, -5, 2)) * noise)
        log = (-0.5 * noise**2 - log_std - jnp.log(1 - action**2 + 1e-6)).sum(-1)
        return action, log

    def judge(critic, seen, action):
        def each(weights):
            return multilayer(list(weights), jnp.concatenate([seen, action], -1)).mean(-1)

        return jax.vmap(each)(critic)

    def critic_loss(critic, before, action, wanted):
        return ((judge(critic, before, action) - wanted) ** 2).mean()

    def step(state, before, action, reward, after, done):
        networks, moments, target, key = state
        key, *own = jax.random.split(key, 3)
        noise = [jax.random.normal(k, action.shape) for k in own]
        following, log = act(networks["actor"], after, noise[0])
        temperature = jnp.exp(networks["temperature"])
        best = judge(target, after, following).min(0) - temperature * log
        wanted = reward + 0.9 * (1 - done) * best
        c_loss, grads = mpmd.accumulate_gradients(critic_loss, MICROBATCHES)(
            networks["critic"], before, action, wanted
        )
        critic, of_critic = updated(networks["critic"], moments["critic"], grads)

        def actor_loss(actor, before, noise):
            action, log = act(actor, before, noise)
            return (temperature * log - judge(critic, before, action).min(0)).mean(), -log

        of_loss = mpmd.accumulate_gradients(actor_loss, MICROBATCHES, has_aux=True)
        (a_loss, entropy), grads = of_loss(networks["actor"], before, noise[1])
        actor, of_actor = updated(networks["actor"], moments["actor"], grads)

        def t_loss(log):
            return jnp.exp(log) * (entropy.mean() + 2)

        t_value, grads = jax.value_and_grad(t_loss)(networks["temperature"])
        log, of_log = updated(networks["temperature"], moments["temperature"], grads)
        target = optax.incremental_update(critic, target, 0.05)
        networks = {"actor": actor, "critic": critic, "temperature": log}
        moments = {"actor": of_actor, "critic": of_critic, "temperature": of_log}
        return (networks, moments, target, key), {"critic": c_loss, "actor": a_loss, "temperature": t_value}

    networks = {"actor": actor, "critic": critic, "temperature": jnp.float32(0)}
    state = (networks, {name: ADAM.init(part) for name, part in networks.items()}, critic, jax.random.key(3))
    return UserStep(step, state, (before, action, reward, after, done), "auto", tolerance=1e-4)


@situation("danijar/dreamerv3:dreamerv3/agent.py")
def world_model():
    """A recurrent state-space model: a scan with categorical samples, balanced divergences, three heads."""
    keys = jax.random.split(jax.random.key(0), 6)
    sizes = {
        "0_encoder": (6, 16, 8),
        "1_cell": (8 + 8 + 2, 16, 8),
        "1_prior": (8, 16, 8),
        "1_posterior": (16, 16, 8),
        "2_decoder": (16, 16, 6),
        "2_reward": (16, 16, 1),
    }
    params = {name: dense(key, *shape) for key, (name, shape) in zip(keys, sizes.items(), strict=True)}

    def loss(params, seen, actions, reward, keys):
        embedded = multilayer(params["0_encoder"], jnp.arcsinh(seen))

        def observe(carry, now):
            h, z = carry
            embedded, action, key = now
            h = jnp.tanh(multilayer(params["1_cell"], jnp.concatenate([h, z, action], -1)))
            prior = multilayer(params["1_prior"], h).reshape(-1, 2, 4)
            posterior = multilayer(params["1_posterior"], jnp.concatenate([h, embedded], -1)).reshape(
                -1, 2, 4
            )
            drawn = jax.nn.one_hot(jax.random.categorical(key, posterior), 4)
            z = drawn + jax.nn.softmax(posterior) - jax.lax.stop_gradient(jax.nn.softmax(posterior))
            z = z.reshape(-1, 8)
            return (h, z), (jnp.concatenate([h, z], -1), prior, posterior)

        rows = len(seen)
        times = jax.tree.map(lambda t: t.swapaxes(0, 1), (embedded, actions))
        start = jnp.zeros((rows, 8)), jnp.zeros((rows, 8))
        _, (features, prior, posterior) = jax.lax.scan(observe, start, (*times, keys[0]))

        def divergence(a, b):
            return (jax.nn.softmax(a) * (jax.nn.log_softmax(a) - jax.nn.log_softmax(b))).sum((-1, -2))

        stop = jax.lax.stop_gradient
        terms = {
            "dyn": 0.5 * jnp.maximum(1, divergence(stop(posterior), prior)).mean(),
            "rep": 0.1 * jnp.maximum(1, divergence(posterior, stop(prior))).mean(),
            "image": ((multilayer(params["2_decoder"], features).swapaxes(0, 1) - seen) ** 2).sum(-1).mean(),
            "reward": (
                (multilayer(params["2_reward"], features)[..., 0].swapaxes(0, 1) - reward) ** 2
            ).mean(),
        }
        return sum(terms.values()), terms

    def step(state, seen, actions, reward):
        params, moments, key = state
        key, own = jax.random.split(key)
        keys = jax.random.split(own, (MICROBATCHES, seen.shape[1]))
        of_loss = mpmd.accumulate_gradients(loss, MICROBATCHES, has_aux=True)
        (value, terms), grads = of_loss(params, seen, actions, reward, keys)
        return (*updated(params, moments, grads), key), {"loss": value, **jax.tree.map(jnp.mean, terms)}

    keys = jax.random.split(jax.random.key(1), 3)
    batch = [jax.random.normal(k, (ROWS, 5, *d)) for k, d in zip(keys, ((6,), (2,), ()), strict=True)]
    state = (params, ADAM.init(params), jax.random.key(3))
    return UserStep(step, state, tuple(batch), mpmd.by_parameters(r"^(\d)_"), tolerance=1e-4)


@situation("google/brax:brax/training/agents/apg/train.py")
def gradients_through_a_simulator():
    """The policy acts in a scan over a differentiable simulator; running statistics normalise inputs."""
    policy = {f"layer_{n}": w for n, w in enumerate(dense(jax.random.key(0), 4, 16, 16, 2))}
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-2, eps=1e-3))

    def loss(policy, start, mean, scale):
        def act(carry, _):
            position, speed = carry
            seen = (jnp.concatenate([position, speed], -1) - mean[0]) / scale[0]
            force = jnp.tanh(multilayer(list(policy.values()), seen))
            speed = 0.9 * speed + 0.1 * (force - position)
            return (position + 0.1 * speed, speed), -(position**2).sum(-1) - 0.01 * (force**2).sum(-1)

        _, rewards = jax.lax.scan(jax.checkpoint(act), (start, jnp.zeros_like(start)), None, 6)
        return -rewards.mean()

    def step(state, start):
        policy, moments, (count, mean, square) = state
        scale = jnp.sqrt(jnp.maximum(square / count, 1e-2))

        def spread(x):
            return jnp.broadcast_to(x, (MICROBATCHES, 4))

        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(
            policy, start, spread(mean), spread(scale)
        )
        seen = jnp.concatenate([start, jnp.zeros_like(start)], -1)
        count += len(start)
        off = seen - mean
        new = mean + off.sum(0) / count
        return (
            *updated(policy, moments, grads, tx),
            (count, new, square + (off * (seen - new)).sum(0)),
        ), value

    start = jax.random.normal(jax.random.key(1), (ROWS, 2))
    state = (policy, tx.init(policy), (jnp.float32(1), jnp.zeros(4), jnp.ones(4)))
    return UserStep(step, state, (start,), "auto")


@situation("google/brax:brax/training/agents/es/train.py")
def evolution_strategies():
    """No gradients: a population of perturbed networks under `vmap`, whose ranks weigh the perturbations."""
    params, tx = dense(jax.random.key(0), WIDTH, 16, 16, 1), optax.adam(1e-2)

    def step(state, x):
        params, moments, key = state
        key, own = jax.random.split(key)
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(own, len(leaves))
        noise = tree.unflatten(
            [jax.random.normal(k, (6, *w.shape)) for k, w in zip(keys, leaves, strict=True)]
        )

        def member(noise, sign):
            return jax.tree.map(lambda w, n: w + sign * 0.1 * n, params, noise)

        def fitness(params):
            return -((mpmd.staged(multilayer)(params, x)[:, 0] - jnp.sin(x).sum(-1)) ** 2).mean()

        plus = jax.vmap(lambda noise: fitness(member(noise, 1.0)))(noise)
        minus = jax.vmap(lambda noise: fitness(member(noise, -1.0)))(noise)
        ranks = jnp.argsort(jnp.argsort(jnp.concatenate([plus, minus]))) / 11.0 - 0.5
        weights = ranks[:6] - ranks[6:]
        grads = jax.tree.map(lambda n: -jnp.tensordot(weights, n, 1) / 6, noise)
        return (*updated(params, moments, grads, tx), key), plus.mean()

    state = (params, tx.init(params), jax.random.key(3))
    return UserStep(
        step, state, (jax.random.normal(jax.random.key(1), (ROWS, WIDTH)),), mpmd.by_parameters(r"^(\d)")
    )
