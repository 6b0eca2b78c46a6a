"""Modules of flax nnx that change in a stage: as if it had no name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpmd
from examples.workloads.models import normal
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

X = normal(1, 8, 4, scale=1.0)


class StatefulBlock(nnx.Module):
    """A layer whose statistics and count of random numbers change with every call."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, scale=1.0):
        return scale * self.drop(jnp.tanh(self.norm(self.dense(x))))


def plain(fn, name):
    return fn


def named(fn, name):
    return mpmd.named_computation(fn, name=name)


def by_module(stage, model, x):
    return stage(model[1], "upper")(stage(model[0], "lower")(x))


def by_method(stage, model, x):
    return stage(model[1].__call__, "upper")(stage(functools.partial(model[0], scale=2.0), "lower")(x))


def by_closure(stage, model, x):
    both, first = [model[1], model[2]], model[0]
    x = stage(lambda x: first(first(x)), "lower")(x)
    return stage(lambda x: both[1](both[0](x)), "upper")(x)


def by_argument(stage, model, x):
    def several(modules, x, *, last):
        return last(modules["one"](x)) + modules["shared"](x)

    x = stage(lambda m, x: m(x), "lower")(model[0], x)
    return stage(several, "upper")({"one": model[1], "shared": model[1]}, x, last=model[2])


@functools.cache
def model_parts():
    return nnx.split(nnx.List([StatefulBlock(nnx.Rngs(i)) for i in range(3)]), nnx.Param, ...)


@pytest.mark.fast_cases("by_closure")
@pytest.mark.parametrize("apply", (by_module, by_method, by_closure, by_argument))
def test_what_a_stage_changes_is_changed(apply):
    structure, params, rest = model_parts()

    def step(stage, params, rest, x):
        def loss_fn(params):
            model = nnx.merge(structure, params, rest, copy=True)
            loss = jnp.mean(apply(stage, model, x) ** 2)
            return loss, nnx.state(model, nnx.Not(nnx.Param))

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return loss, grads, jax.tree.map(lambda a: jax.random.key_data(a) if is_key(a) else a, changed)

    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    config = mpmd.make_config(topology, {"lower": "m0", "upper": "m1"}, backend="xla")
    want = jax.jit(functools.partial(step, plain))(params, rest, X)
    assert relative_difference(mpmd.jit(functools.partial(step, named), config)(params, rest, X), want) < 1e-5


def is_key(a):
    return jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)


def test_what_a_stage_adds_is_there():
    class Remembering(nnx.Module):
        def __call__(self, x):
            self.seen = nnx.Cache(2 * x)
            return x

    module = Remembering()
    mpmd.named_computation(module, name="lower")(X)
    assert (module.seen[...] == 2 * X).all()
