"""A recipe for haiku: by the names of its modules, in parameters or in scopes."""

from __future__ import annotations

import haiku as hk
import jax
import optax
import pytest

import mpmd
from tests.support.recipes import check_recipe, token_batch

pytestmark = pytest.mark.slow

LAYERS, WIDTH, WORDS = 4, 16, 32


class Block(hk.Module):
    def __call__(self, x):
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(2, 8, model_size=WIDTH, w_init=hk.initializers.VarianceScaling())(
            y, y, y
        )
        return x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(hk.LayerNorm(-1, True, True)(x))))


def forward(ids):
    x = hk.Embed(WORDS, WIDTH)(ids)
    for i in range(LAYERS):
        x = Block(name=f"layer_{i}")(x)
    return hk.Linear(WORDS)(x)


@pytest.mark.parametrize(
    "stages", [mpmd.by_parameters(r"layer_(\d+)"), mpmd.by_scopes(r"layer_(\d+)")], ids=str
)
def test_haiku(stages):
    net, ids = hk.transform(forward), token_batch(WORDS)
    params = net.init(jax.random.key(0), ids)

    def loss(params, ids):
        return optax.softmax_cross_entropy_with_integer_labels(
            net.apply(params, None, ids)[:, :-1], ids[:, 1:]
        ).mean()

    check_recipe(params, loss, (ids,), stages)
