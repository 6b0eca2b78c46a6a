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


def folded(w, x):
    """Groups of layers; the outer loop returns what the inner ones do."""
    return jax.lax.scan(lambda x, rows: jax.lax.scan(layer, x, rows), x, 2 * w.reshape(2, 3, 4))


def flattened(w, x):
    """Each row of the value is two layers, without a loop of their own."""

    def two(x, rows):
        return layer(layer(x, rows[:4])[0], rows[4:])

    return jax.lax.scan(two, x, w.reshape(3, 8))


def in_two_loops(w, x):
    x, first = jax.lax.scan(layer, x, w[:2])
    return jax.lax.scan(layer, jnp.cos(x), w[2:]), first


@pytest.mark.parametrize("lengths", ((3, 3), (1, 5)))
@pytest.mark.parametrize(
    "function",
    (forward, backward, unrolled, sliced, decayed, with_own_derivative, folded, in_two_loops),
)
def test_a_divided_function_gives_the_same(function, lengths):
    flat, division = divided(function, lengths)
    assert division.lengths == {("w", 6): list(lengths)[:: -1 if function is backward else 1]}
    same(flat, function)


def test_groups_that_run_from_the_last_to_the_first():
    def function(w, x):
        rows = w.reshape(2, 3, 4)
        return jax.lax.scan(lambda x, rows: jax.lax.scan(layer, x, rows), x, rows, reverse=True)

    flat, division = divided(function, (4, 2))
    assert division.lengths == {("w", 6): [1, 2, 3]}  # rows 3 to 5 and 0 are of the first stage
    same(flat, function)


def test_an_iteration_without_a_loop_of_its_own_is_in_one_stage():
    flat, division = divided(flattened, (2, 4))
    assert division.lengths == {("w", 6): [2, 4]}
    same(flat, flattened)
    with pytest.raises(ConfigError, match=r"an iteration of scan \(.* runs 2 layers, and is in one stage"):
        divided(flattened, (3, 3))


def over_data(w, x):
    return jax.lax.scan(layer, x.sum(), x)[0] + w.sum()


def over_columns(w, x):
    return jax.lax.scan(layer, jnp.concatenate([x, x[:2]]), w.T)[0]


def over_others(w, x):
    """As many values as two rows have, but not those of rows."""
    return jax.lax.scan(lambda x, row: layer(x, row[:4]), x, w.reshape(4, 6))[0]


@pytest.mark.parametrize("function", (indexed, over_data, over_columns))
def test_what_does_not_run_over_the_rows_is_refused(function):
    with pytest.raises(ConfigError, match="no scan has rows of what it matches"):
        divided(function, (3, 3))


def test_rows_with_others_between_are_not_taken_for_rows():
    with pytest.raises(ConfigError):
        divided(lambda w, x: layer(x, w[::2].sum(0))[0], (3, 3))


def in_loops(*parts):
    def function(w, x):
        for part in parts:
            x, _ = jax.lax.scan(layer, x, part(w))
        return x

    return function


def test_a_loop_over_every_second_row_does_not_run_over_neighbours():
    function = in_loops(lambda w: w[::2], lambda w: w[3:])
    same(divided(function, (3, 3))[0], function)


def test_a_loop_over_rows_of_another_length_does_not_run_over_those_of_the_stack():
    def function(w, x):
        return jax.lax.scan(layer, over_others(w, x), w[4:])[0]

    same(divided(function, (2, 4))[0], function)


@pytest.mark.parametrize(
    "others", (lambda w: w[2:], lambda w: w[4:, 1:2]), ids=("rows_of_both", "columns_of_rows")
)
def test_loops_that_do_not_read_each_row_once_are_refused(others):
    with pytest.raises(ConfigError, match="which are of several stages"):
        divided(in_loops(lambda w: w[:4], others), (3, 3))


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
