"""Losses that divide by a count of their own microbatch are found; those that mean something else are not."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.errors import SignatureError

W, X, MASK = jnp.ones((4, 4)), jnp.ones((8, 4)), jnp.ones(8)
TOTAL = jnp.float32(7)


def of_rows(w, x):
    return ((x @ w) ** 2).mean(-1)


@jax.jit
def jitted(losses, mask):
    return (losses * mask).sum() / mask.sum()


UNEVEN = {
    "quotient": lambda w, x, m: (of_rows(w, x) * m).sum() / m.sum(),
    "at least one": lambda w, x, m: (of_rows(w, x) * m).sum() / jnp.maximum(m.sum(), 1),
    "not zero": lambda w, x, m: (of_rows(w, x) * m).sum() / jnp.where(m.sum() == 0, 1, m.sum()),
    "mean where": lambda w, x, m: jnp.mean(of_rows(w, x), where=m > 0),
    "average": lambda w, x, m: jnp.average(of_rows(w, x), weights=m),
    "within the sum": lambda w, x, m: (of_rows(w, x) * m / m.sum()).sum(),
    "inverse": lambda w, x, m: (of_rows(w, x) * m).sum() * (1 / m.sum()),
    "a term": lambda w, x, m: 0.5 * ((of_rows(w, x) * m).sum() / (m > 0).sum() + 0.1 * (w**2).sum()),
    "in a jit": lambda w, x, m: jitted(of_rows(w, x), m),
    "in a checkpoint": lambda w, x, m: jax.checkpoint(lambda w: jitted(of_rows(w, x), m))(w),
    "in a name": lambda w, x, m: mpmd.named_computation(jitted, name="n")(of_rows(w, x), m),
}
UNEVEN["before a jit"] = lambda w, x, m: jax.jit(lambda loss: 2 * loss)(UNEVEN["quotient"](w, x, m))
MEANT = {
    "mean": lambda w, x, m: of_rows(w, x).mean(),
    "sum": lambda w, x, m: (of_rows(w, x) * m).sum(),
    "closed over": lambda w, x, m: (of_rows(w, x) * m).sum() / TOTAL,
    "given": lambda w, x, m: (of_rows(w, x) * m).sum() / m[0],
    "each row": lambda w, x, m: (of_rows(w, x) * m / x.sum(-1)).mean(),
    "deviation": lambda w, x, m: (of_rows(w, x) * (m - m.mean()) / (m.std() + 1e-6)).mean(),
    "corrected": lambda w, x, m: (of_rows(w, x) * m).sum() / m.sum() * (m.sum() / TOTAL),
    "of parameters": lambda w, x, m: (of_rows(w, x) * m).sum() / (x @ w).sum(),
    "constant": lambda w, x, m: of_rows(w, x).sum() / jnp.ones(8).sum(),
    "not linear": lambda w, x, m: jnp.log((of_rows(w, x) * m).sum() / m.sum()),
}


def warned(loss, num_microbatches=2, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jax.eval_shape(mpmd.accumulate_gradients(loss, num_microbatches, **options), W, X, MASK)
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("name", UNEVEN)
def test_a_mean_over_a_count_of_the_microbatch_is_reported(name):
    (text,) = warned(UNEVEN[name])
    assert "divides by a sum over the rows of its own microbatch, at " in text.splitlines()[0]
    assert "test_uneven_means.py" in text.splitlines()[0]
    assert text.endswith("return (total, weight) instead of total / weight, and give weighted=True")


@pytest.mark.parametrize("name", MEANT)
def test_what_may_be_meant_is_not(name):
    assert warned(MEANT[name]) == []


def test_long_sums_of_shared_terms_take_linear_time():
    def loss(w, x, m):
        value = of_rows(w, x).sum()
        for _ in range(200):
            value = value + 0.5 * value
        return value

    assert warned(loss) == []


def test_nor_are_one_microbatch_and_weights():
    assert warned(UNEVEN["quotient"], 1) == []
    assert warned(lambda w, x, m: ((of_rows(w, x) * m).sum(), m.sum()), weighted=True) == []


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_weighted_loss_is_a_total_and_a_weight(has_aux):
    with pytest.raises(SignatureError) as error:
        warned(UNEVEN["quotient"], weighted=True, has_aux=has_aux)
    form = "((total, weight), aux)" if has_aux else "(total, weight)"
    assert str(error.value) == (
        f"with weighted, the loss function must return {form}, total and weight scalars, got float32[]"
    )


WEIGHTS = {"f32": lambda m: m.sum(), "i32": lambda m: (m > 0).sum(), "bool": lambda m: m.sum() > 2}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_of_any_kind_are_added(kind):
    weight = WEIGHTS[kind]
    mask = jnp.arange(8.0) % 3

    def loss(w, x, m):
        return (of_rows(w, x) * m).sum(), weight(m)

    got, _ = mpmd.accumulate_gradients(loss, 2, weighted=True)(W, X, mask)
    counts = sum(float(weight(half)) for half in jnp.split(mask, 2))
    assert got == pytest.approx(float((of_rows(W, X) * mask).sum()) / counts, rel=1e-6)
