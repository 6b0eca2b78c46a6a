"""Functions over stacked parameters, divided: the same numbers, or a refusal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import ConfigError
from mpmd.tracing.stages.items import FlatFunction, ItemEmission
from mpmd.tracing.stages.stacked.scan_ranges import divide_scans

STACK = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
X = np.random.default_rng(1).standard_normal(4).astype(np.float32)


def layer(x, w):
    return jnp.sin(x * w) + 0.1, x.sum()


def forward(w, x):
    return jax.lax.scan(layer, x, w)


def backward(w, x):
    return jax.lax.scan(layer, x, w, reverse=True)


def unrolled(w, x):
    return jax.lax.scan(layer, x, w, unroll=3)


def indexed(w, x):
    return jax.lax.fori_loop(0, 6, lambda i, x: layer(x, w[i])[0], x)


def sliced(w, x):
    for i in range(6):
        x = layer(x, w[i])[0]
    return x


def decayed(w, x):
    """Beside the layers, a value of the parameters alone."""
    return forward(w, x)[0].sum() + 0.1 * (w**2).sum()


def with_own_derivative(w, x):
    return forward(w, x)[0].sum() + jax.nn.relu(w).sum()


@pytest.mark.parametrize("lengths", ((3, 3), (1, 5)))
@pytest.mark.parametrize(
    "function",
    (forward, backward, unrolled, sliced, decayed, with_own_derivative),
)
def test_a_divided_function_gives_the_same(function, lengths):
    flat, division = divided(function, lengths)
    assert division.lengths == {("w", 6): list(lengths)[:: -1 if function is backward else 1]}
    same(flat, function)


def over_data(w, x):
    return jax.lax.scan(layer, x.sum(), x)[0] + w.sum()


def over_columns(w, x):
    return jax.lax.scan(layer, jnp.concatenate([x, x[:2]]), w.T)[0]


@pytest.mark.parametrize("function", (indexed, over_data, over_columns))
def test_what_does_not_run_over_the_rows_is_refused(function):
    with pytest.raises(ConfigError, match="no scan has rows of what it matches"):
        divided(function, (3, 3))


def test_rows_with_others_between_are_not_taken_for_rows():
    with pytest.raises(ConfigError):
        divided(lambda w, x: layer(x, w[::2].sum(0))[0], (3, 3))


def divided(function, lengths):
    """The items of a function over stacked rows, divided."""
    flat = FlatFunction(jax.make_jaxpr(function)(STACK, X))
    selector = mpmd.split("w", lengths=lengths).on([f"m{k}" for k in range(len(lengths))])
    return flat, divide_scans(flat, {flat.inputs[0]: "w"}, selector)


def same(flat, function):
    """Checks that items compute what a function does."""
    env = {**flat.constants, **dict(zip(flat.inputs, (STACK, X), strict=True))}
    ItemEmission(flat).compute(flat.items, env, 0)
    made = [env[v] for v in flat.outputs]
    for got, want in zip(made, jax.tree.leaves(jax.jit(function)(STACK, X)), strict=True):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)
