"""Random numbers that are equal in all microbatches: found where they are for rows, and only there."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.tracing.repeated_draws import repeated_draws

KEY = jax.random.key(0)
OLD_KEY = jax.random.PRNGKey(0)
PARAMS = jnp.ones((3, 3))
X = jnp.ones((8, 3))


def dropped(x, key):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


def closed_over(p, x):
    return dropped(x @ p, KEY).sum()


def old_key(p, x):
    return dropped(x @ p, OLD_KEY).sum()


def made_inside(p, x):
    return dropped(x @ p, jax.random.key(1)).sum()


def in_scanned_layers(p, x):
    def layer(carry, _):
        x, key = carry
        key, own = jax.random.split(key)
        return (dropped(x @ p, own), key), None

    return jax.lax.scan(layer, (x, KEY), length=2)[0][0].sum()


def in_rematerialized_branch(p, x):
    layer = jax.checkpoint(lambda x: dropped(x @ p, KEY))
    return jax.lax.cond(x.sum() > 0, layer, lambda x: x, x).sum()


def in_a_loop(p, x):
    noise = jax.lax.while_loop(
        lambda n: n[0] < 3, lambda n: (n[0] + 1, n[1] + jax.random.gamma(KEY, 1.0, x.shape)), (0, x)
    )
    return (x @ p + noise[1]).sum()


@pytest.mark.parametrize(
    "loss",
    [closed_over, old_key, made_inside, in_scanned_layers, in_rematerialized_branch, in_a_loop],
    ids=lambda f: f.__name__,
)
def test_numbers_of_rows_from_a_key_of_all_microbatches(loss):
    with pytest.warns(UserWarning, match=f"^{loss.__name__} draws random numbers for its rows") as issued:
        jax.eval_shape(mpmd.accumulate_gradients(loss, 4), PARAMS, X)
    (warning,) = issued
    assert "test_repeated_draws.py" in str(warning.message).partition("\n")[0]
    assert "jax.random.split(key, 4), and keys[0] in the loss" in str(warning.message)


def a_key_for_each(p, x, keys):
    return dropped(x @ p, keys[0]).sum()


def folded_with_a_number(p, x, number):
    return dropped(x @ p, jax.random.fold_in(KEY, number[0])).sum()


def a_key_for_each_row(p, x, keys):
    return jax.vmap(dropped)(x @ p, keys).sum()


def in_a_scan_whose_key_is_of_the_batch_later(p, x, keys):
    """The first layer folds the key that the second one draws from."""

    def layer(carry, own):
        x, key = carry
        return (dropped(x @ p, jax.random.fold_in(own, jax.random.bits(key))), key), None

    return jax.lax.scan(layer, (x, keys[0]), jax.random.split(KEY, 2))[0][0].sum()


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (a_key_for_each, jax.random.split(KEY, 4)),
        (a_key_for_each_row, jax.random.split(KEY, 8)),
        (folded_with_a_number, jnp.arange(4)),
        (in_a_scan_whose_key_is_of_the_batch_later, jax.random.split(KEY, 4)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_keys_of_each_microbatch(loss, more):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(mpmd.accumulate_gradients(loss, 4), PARAMS, X, more)


def noise_of_weights(p, x):
    return (x @ dropped(p, KEY)).sum()


def one_mask_for_all_rows(p, x):
    return jax.vmap(lambda row: dropped(row @ p, KEY))(x).sum()


def for_two_rows_only(p, x):
    return (dropped(x, KEY) @ p + jnp.ones((2, 3))).sum()


@pytest.mark.parametrize(
    "loss", [noise_of_weights, one_mask_for_all_rows, for_two_rows_only], ids=lambda f: f.__name__
)
def test_numbers_that_a_whole_batch_has_too(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(mpmd.accumulate_gradients(loss, 4), PARAMS, X)


def test_one_microbatch_is_the_whole_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(mpmd.accumulate_gradients(closed_over, 1), PARAMS, X)


def test_each_draw_is_found_with_its_shape():
    def draws(x, key):
        def later(i, carry):
            used, key = carry
            return used + jax.random.normal(key, (2,)), jax.random.fold_in(key, x[0, 0].astype(int))

        once = jax.random.normal(KEY, (5,))
        return jax.lax.fori_loop(0, 3, later, (jnp.zeros(2), KEY)), once, jax.random.normal(key, (7,))

    jaxpr = jax.make_jaxpr(draws)(X, KEY).jaxpr
    both, key_alone = (repeated_draws(jaxpr, batches) for batches in (2, 1))
    assert [draw.shape for draw in both] == [(5,)]  # the loop's key is folded with the batch
    assert [draw.shape for draw in key_alone] == [(5,), (2,)]
