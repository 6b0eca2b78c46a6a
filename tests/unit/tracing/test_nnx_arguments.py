"""Steps of flax nnx as its users write them: what works as with `nnx.jit`, and what says how to write it."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpmd
from mpmd.errors import SignatureError

WIDTH = 4
X = jnp.ones((8, WIDTH))
CONFIG = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), stages=mpmd.by_parameters(r"layers/(\d+)"))


class DropoutLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(self.dense(x)))


class PlainLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class NormLayer(PlainLayer):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(super().__call__(x))


class LayersInOrder(nnx.Module):
    def __init__(self, layer):
        self.layers = nnx.List([layer(nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def step(model, x):
    return mpmd.accumulate_gradients(loss_fn, 4)(model, x)


def test_a_module_with_random_state_names_it_and_what_to_write():
    with pytest.raises(
        SignatureError, match="differentiates by model, but these have no gradients"
    ) as caught:
        mpmd.jit(step, CONFIG).lower(LayersInOrder(DropoutLayer), X)
    assert "model.layers[0].drop.rngs.count.value is uint32[]\n" in str(caught.value)
    assert "nnx.split(model, nnx.Param, ...); differentiate by params" in str(caught.value)
    assert isinstance(caught.value, TypeError)  # as JAX's


def test_other_leaves_without_gradients_are_named():
    def of_state(state, x):
        return mpmd.accumulate_gradients(lambda state, x: (x @ state["w"]).mean(), 4)(state, x)

    with pytest.raises(SignatureError, match=r"state\['step'\] is int32\[\]\n  differentiate by trained"):
        jax.eval_shape(of_state, {"w": jnp.eye(WIDTH), "step": 0}, X)


def test_a_module_of_parameters_is_an_argument_like_any():
    lowered = mpmd.jit(step, CONFIG).lower(LayersInOrder(PlainLayer), X)
    assert lowered.warnings == []
    assert isinstance(jax.tree.unflatten(lowered.traced.out_tree, [0] * 5)[1], LayersInOrder)


@pytest.mark.parametrize("of_loss", [step, jax.value_and_grad(mpmd.staged(loss_fn))])
def test_statistics_that_a_loss_changes_in_its_argument_are_not_lost_in_silence(of_loss):
    with pytest.raises(SignatureError, match=r"loss_fn changes model.layers.0.norm.mean and 3 more var"):
        mpmd.jit(of_loss, CONFIG).lower(LayersInOrder(NormLayer), X)


def train_in_place(model, optimizer, x):
    loss, grads = nnx.value_and_grad(mpmd.staged(loss_fn))(model, x)
    optimizer.update(model, grads)
    return loss


def test_updates_in_place_are_not_lost_in_silence():
    model = LayersInOrder(PlainLayer)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(
        SignatureError, match="train_in_place changes model.layers.0.dense.bias and .* are lost"
    ) as e:
        mpmd.jit(train_in_place, CONFIG).lower(model, optimizer, X)
    assert "nnx.split((model, optimizer))" in str(e.value)

    def returning(model, optimizer, x):
        return train_in_place(model, optimizer, x), model, optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpmd.jit(returning, CONFIG).lower(model, optimizer, X)


def test_counts_of_random_numbers_that_are_lost_are_warned_of():
    def evaluate(model, x):
        return mpmd.staged(loss_fn)(model, x)

    with pytest.warns(
        UserWarning, match="loss_fn changes model.layers.0.drop.rngs.count and 1 more variables"
    ):
        mpmd.jit(evaluate, CONFIG).lower(LayersInOrder(DropoutLayer), X)


def test_a_module_that_a_loss_closes_over_gets_a_note():
    graph, params, rest = nnx.split(LayersInOrder(DropoutLayer), nnx.Param, ...)

    def loss_of(params, x):
        return loss_fn(nnx.merge(graph, params, rest), x)

    with pytest.raises(Exception, match="Cannot mutate RngCount") as caught:
        mpmd.jit(lambda p, x: mpmd.accumulate_gradients(loss_of, 4)(p, x), CONFIG).lower(params, X)
    assert "nnx.merge(graph, params, rest, copy=True)" in "".join(caught.value.__notes__)


def test_one_mask_for_all_microbatches_is_warned_of():
    graph, params, rest = nnx.split(LayersInOrder(DropoutLayer), nnx.Param, ...)

    def loss_of(params, x, keys=None):
        model = nnx.merge(graph, params, rest, copy=True)
        if keys is not None:
            nnx.reseed(model, default=keys[0])
        return loss_fn(model, x)

    of_loss = mpmd.accumulate_gradients(loss_of, 4)
    with pytest.warns(
        UserWarning, match=r"loss_of draws random numbers.*test_nnx_arguments(?s:.*)nnx.reseed"
    ):
        mpmd.jit(of_loss, CONFIG).lower(params, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpmd.jit(of_loss, CONFIG).lower(params, X, jax.random.split(jax.random.key(0), 4))
