"""Optimizers whose update is more than a sum over leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import mpmd
from tests.support.situations import UserStep, situation
from tests.support.situations.models import MICROBATCHES, Residual, classified


def trained(tx, gradient_of, stages, *, steps=3, with_value=False, results=lambda state, grads: ()):
    """A classifier under an optimizer of optax."""
    params, loss, batch = classified()
    tx = optax.with_extra_args_support(tx)

    def step(state, x, labels):
        params, moments = state
        value, grads = gradient_of(loss)(params, x, labels)
        extra = {"value": value} if with_value else {}
        updates, moments = tx.update(grads, moments, params, **extra)
        return (optax.apply_updates(params, updates), moments), (value, results(moments, grads))

    return UserStep(step, (params, tx.init(params)), batch, stages, steps=steps)


@situation("alpa-projects/alpa#839")
def multi_steps():
    """`optax.MultiSteps`: a `lax.cond` around the update of every second step."""
    tx = optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return trained(tx, gradient, mpmd.by_parameters(r"layer_(\d+)"), steps=4)


@situation("jenkspt/gpt-jax#2")
def clip_and_apply_every():
    """`optax.apply_every` behind a clip by the global norm."""
    tx = optax.chain(optax.clip_by_global_norm(0.2), optax.adam(1e-2), optax.apply_every(2))

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return trained(tx, gradient, mpmd.by_parameters(r"layer_(\d+)"), steps=4)


@situation("google-deepmind/optax#828")
def zero_nans_in_multi_steps():
    """`optax.zero_nans` inside of `MultiSteps`: booleans in the state of a conditional."""
    tx = optax.MultiSteps(optax.chain(optax.zero_nans(), optax.adam(1e-2)), 2).gradient_transformation()

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return trained(tx, gradient, mpmd.by_parameters(r"layer_(\d+)"), steps=4)


@situation("google-deepmind/optax:optax/transforms/_conditionality.py")
def applied_if_finite():
    """`optax.apply_if_finite`: an update with a NaN changes nothing, and is counted."""
    params, loss, (x, labels) = classified()
    tx = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3)

    def step(state, x, labels):
        params, moments, count = state
        x = jnp.where(count == 1, jnp.nan, 1.0) * x
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, count + 1), (value, moments.total_notfinite)

    state = (params, tx.init(params), jnp.int32(0))
    return UserStep(step, state, (x, labels), mpmd.by_parameters(r"layer_(\d+)"), steps=3)


@situation("google-deepmind/optax:examples/lookahead_mnist.ipynb")
def lookahead():
    """Fast and slow parameters, synchronised every second step."""
    params, loss, batch = classified()
    tx = optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)
    both = optax.LookaheadParams.init_synced(params)

    def step(state, x, labels):
        both, moments = state
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(both.fast, x, labels)
        updates, moments = tx.update(grads, moments, both)
        return (optax.apply_updates(both, updates), moments), value

    return UserStep(step, (both, tx.init(both)), batch, mpmd.by_parameters(r"layer_(\d+)"), steps=3)


@situation("google-deepmind/optax:examples/contrib/schedule_free.ipynb")
def schedule_free():
    """Schedule-free AdamW; evaluation parameters are computed from the state in the step."""
    params, loss, batch = classified()
    tx = contrib.schedule_free_adamw(1e-2, warmup_steps=2)

    def step(state, x, labels):
        params, moments = state
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        updates, moments = tx.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        return (params, moments), (value, contrib.schedule_free_eval_params(moments, params))

    return UserStep(step, (params, tx.init(params)), batch, mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-deepmind/optax:examples/contrib/sam.ipynb")
def sharpness_aware():
    """Sharpness-aware minimisation, opaque: the update computes a second gradient at other parameters."""
    params, loss, batch = classified()
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.05))
    tx = contrib.sam(optax.sgd(0.1), adversary, sync_period=2, opaque_mode=True)

    def step(state, x, labels):
        params, moments = state
        gradient = jax.grad(mpmd.staged(loss))
        updates, moments = tx.update(
            gradient(params, x, labels),
            moments,
            params,
            grad_fn=lambda params, _: gradient(params, x, labels),
        )
        return (optax.apply_updates(params, updates), moments), ()

    return UserStep(step, (params, tx.init(params)), batch, mpmd.by_parameters(r"layer_(\d+)"))


@situation(
    "google-deepmind/optax#1269",
    refused="named computations are inside a loop whose number of iterations is not a constant",
)
def backtracking_line_search():
    """A line search whose loss, in stages too, is evaluated in a loop of unknown length."""
    params, loss, (x, labels) = classified()
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))

    def step(state, x, labels):
        params, moments = state
        staged = mpmd.staged(loss)
        value, grads = jax.value_and_grad(staged)(params, x, labels)
        updates, moments = tx.update(
            grads, moments, params, value=value, grad=grads, value_fn=lambda params: staged(params, x, labels)
        )
        return (optax.apply_updates(params, updates), moments), value

    return UserStep(step, (params, tx.init(params)), (x, labels), mpmd.by_parameters(r"layer_(\d+)"))


@situation("google/flax#4144")
def lbfgs():
    """L-BFGS with a zoom line search over the whole training set, whose loss is evaluated in a loop."""
    params, loss, batch = classified()
    tx = optax.lbfgs()

    def step(state, x, labels):
        params, moments = state
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        updates, moments = tx.update(
            grads, moments, params, value=value, grad=grads, value_fn=lambda params: loss(params, x, labels)
        )
        return (optax.apply_updates(params, updates), moments), value

    return UserStep(
        step, (params, tx.init(params)), batch, mpmd.by_parameters(r"layer_(\d+)"), tolerance=1e-3
    )


@situation("google-deepmind/optax#1426")
def injected_hyperparameters():
    """`inject_hyperparams`: schedules for rate and decay in the state, logged from it."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 8)
    tx = optax.inject_hyperparams(optax.adamw)(schedule, weight_decay=optax.linear_schedule(0.1, 0.0, 4))

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    def rate(state, _):
        return state.hyperparams

    return trained(tx, gradient, mpmd.by_parameters(r"layer_(\d+)"), results=rate)


@situation("google-deepmind/optax#477")
def frozen_by_partition():
    """Frozen layers by `optax.partition` and `set_to_zero`, labels from the paths."""

    def label(path, _):
        return "zero" if "layer_0" in str(path) or "embed" in str(path) else "train"

    def labels(params):
        return jax.tree_util.tree_map_with_path(label, params)

    tx = optax.partition({"train": optax.sgd(0.1, 0.9), "zero": optax.set_to_zero()}, labels)

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return trained(tx, gradient, mpmd.by_parameters(r"layer_(\d+)"))


@situation("huggingface/transformers#11936")
def decay_by_masks():
    """Two masked AdamW, one with weight decay for kernels, one without for biases."""

    def kernels(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    def others(params):
        return jax.tree.map(lambda leaf: leaf.ndim <= 1, params)

    tx = optax.chain(
        optax.masked(optax.adamw(1e-2, weight_decay=0.0), others),
        optax.masked(optax.adamw(1e-2, weight_decay=0.1), kernels),
    )

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return trained(tx, gradient, mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-deepmind/optax:examples/contrib/reduce_on_plateau.ipynb")
def reduced_on_plateau():
    """`reduce_on_plateau`: the rate depends on losses of steps before."""
    tx = optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1, accumulation_size=2))

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    def scale(state, _):
        return state[1].scale

    return trained(tx, gradient, mpmd.by_parameters(r"layer_(\d+)"), steps=4, with_value=True, results=scale)


@situation("google-deepmind/optax:examples/contrib/muon.ipynb")
def muon():
    """Muon: each matrix is orthogonalised, biases get AdamW."""

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return trained(contrib.muon(1e-2), gradient, mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-deepmind/optax#186")
def adafactor():
    """Adafactor with factored moments, clipped by the root mean square of each leaf."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4, weight_decay_rate=1e-3)

    def gradient(loss):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)

    return trained(tx, gradient, mpmd.by_parameters(r"layer_(\d+)"))


@situation("marin-community/levanter#973")
def skipped_steps():
    """Updates are scaled by 0 where the norm of the gradient leaves a window of the last steps."""
    params, loss, batch = classified()
    tx = optax.adam(1e-2)

    def step(state, x, labels):
        params, moments, norms, count = state
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x, labels)
        norm = optax.tree.norm(grads)
        known = jnp.arange(4) < count
        mean = jnp.where(known, norms, 0).sum() / jnp.maximum(known.sum(), 1)
        deviation = jnp.sqrt(jnp.where(known, (norms - mean) ** 2, 0).sum() / jnp.maximum(known.sum(), 1))
        factor = jnp.where((count > 2) & (norm > mean + 2 * deviation), 0.0, 1.0)
        updates, moments = tx.update(jax.tree.map(lambda g: g * factor, grads), moments, params)
        updates = jax.tree.map(lambda u: u * factor, updates)
        norms = norms.at[count % 4].set(norm)
        return (optax.apply_updates(params, updates), moments, norms, count + 1), (value, norm, factor)

    state = (params, tx.init(params), jnp.zeros(4), jnp.int32(0))
    return UserStep(step, state, batch, mpmd.by_parameters(r"layer_(\d+)"), steps=4)


@situation("google-deepmind/optax:examples/contrib/differentially_private_sgd.ipynb")
def per_example_gradients():
    """Gradients of each example by `vmap`, clipped one by one, summed, with noise."""
    params, loss, batch = classified()
    tx = contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.5, seed=7)

    def step(state, x, labels):
        params, moments = state
        of_one = jax.grad(mpmd.staged(loss))
        grads = jax.vmap(of_one, (None, 0, 0))(params, x[:, None], labels[:, None])
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), ()

    return UserStep(step, (params, tx.init(params)), batch, mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-deepmind/optax:examples/adversarial_training.ipynb")
def adversarial_examples():
    """Projected gradient descent on the images, in a loop of the step, before the training step."""
    params, loss, batch = classified(Residual())
    tx = optax.adam(1e-2)

    def step(state, x, labels):
        params, moments = state

        def ascend(_, attacked):
            moved = attacked + 0.05 * jnp.sign(jax.grad(loss, 1)(params, attacked, labels))
            return jnp.clip(moved, x - 0.1, x + 0.1)

        attacked = jax.lax.fori_loop(0, 3, ascend, x)
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, attacked, labels)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return UserStep(step, (params, tx.init(params)), batch, mpmd.by_parameters(r"layer_(\d+)"))


@situation("google-deepmind/optax:examples/meta_learning.ipynb")
def meta_learning():
    """The gradient of a loss behind a step of gradient descent: a gradient in a gradient."""
    params, loss, (x, labels) = classified()
    tx = optax.adam(1e-2)

    def adapted(params, x, labels):
        grads = jax.grad(loss)(params, x, labels)
        return loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x[::-1], labels[::-1])

    def step(state, x, labels):
        params, moments = state
        value, grads = jax.value_and_grad(mpmd.staged(adapted))(params, x, labels)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return UserStep(step, (params, tx.init(params)), (x, labels), mpmd.by_parameters(r"layer_(\d+)"))
