"""A recipe for keras with its JAX backend: a list of variables without names, layers that leave scopes."""

from __future__ import annotations

import os

import jax
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")

import mpmd
from tests.support.recipes import check_recipe

pytestmark = pytest.mark.slow
keras = pytest.importorskip("keras")


def test_keras():
    if keras.backend.backend() != "jax":
        pytest.skip("keras was imported before with another backend")
    given = keras.Input((16,))
    x = keras.layers.Dense(32, activation="gelu", name="embedding")(given)
    for i in range(4):
        y = keras.layers.LayerNormalization(name=f"norm_{i}")(x)
        y = keras.layers.Dense(48, activation="gelu", name=f"inner_{i}")(y)
        x = keras.layers.Add(name=f"sum_{i}")([x, keras.layers.Dense(32, name=f"outer_{i}")(y)])
    model = keras.Model(given, keras.layers.Dense(4, name="head")(x))
    params = [variable.value for variable in model.trainable_variables]
    rest = [variable.value for variable in model.non_trainable_variables]

    def loss(params, x, y):
        return ((model.stateless_call(params, rest, x, training=True)[0] - y) ** 2).mean()

    x, y = jax.random.normal(jax.random.key(0), (8, 16)), jax.random.normal(jax.random.key(1), (8, 4))
    check_recipe(params, loss, (x, y), mpmd.by_scopes(r"(?:norm|inner|sum|outer)_(\d+)"))
