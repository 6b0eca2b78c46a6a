"""Recipes for equinox: a tuple of layers, and stacked layers run by a scan."""

from __future__ import annotations

import jax
import optax
import pytest

import mpmd
from tests.support.recipes import check_recipe, token_batch

pytestmark = pytest.mark.slow
eqx = pytest.importorskip("equinox")

LAYERS, WIDTH, WORDS = 4, 16, 32


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=one)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=two)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(x)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list[Block] | Block
    head: eqx.nn.Linear
    scanned: bool = eqx.field(static=True)
    remat: bool = eqx.field(static=True)

    def __init__(self, scanned, remat):
        one, two, three = jax.random.split(jax.random.key(0), 3)
        self.embed, self.head = eqx.nn.Embedding(WORDS, WIDTH, key=one), eqx.nn.Linear(WIDTH, WORDS, key=two)
        keys = jax.random.split(three, LAYERS)
        self.layers = eqx.filter_vmap(Block)(keys) if scanned else [Block(key) for key in keys]
        self.scanned, self.remat = scanned, remat

    def __call__(self, ids):
        x = jax.vmap(self.embed)(ids)
        run = eqx.filter_checkpoint(lambda layer, x: layer(x)) if self.remat else lambda layer, x: layer(x)
        if not self.scanned:
            for layer in self.layers:
                x = run(layer, x)
            return jax.vmap(self.head)(x)
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, own: (run(eqx.combine(own, static), x), None), x, arrays)
        return jax.vmap(self.head)(x)


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("scanned", [False, True], ids=["plain", "scanned"])
def test_equinox(scanned, remat):
    params, static = eqx.partition(Model(scanned, remat), eqx.is_inexact_array)

    def loss(params, ids):
        logits = jax.vmap(eqx.combine(params, static))(ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    stages = mpmd.split("layers") if scanned else mpmd.by_parameters(r"layers/(\d+)")
    check_recipe(params, loss, (token_batch(WORDS),), stages)


def test_a_whole_model_as_an_argument_says_how_to_divide_its_leaves():
    def loss(model, ids):
        return jax.vmap(model)(ids).mean()

    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), stages="auto")
    step = mpmd.jit(lambda model, ids: mpmd.accumulate_gradients(loss, 2)(model, ids), config)
    first = r"model.layers\[0\].mlp.activation is gelu, a "
    with pytest.raises(
        mpmd.errors.SignatureError, match=rf"{first}(?s:.*)eqx.partition\(model, eqx.is_array\)"
    ):
        step(Model(False, False), token_batch(WORDS))


def test_vision_transformer_of_equimo():
    """Source: clementpoiret/Equimo:equimo/models/vit.py."""
    vit = pytest.importorskip("equimo.models.vit")
    model = vit.VisionTransformer(
        16, 3, 32, 8, 4, [LAYERS], key=jax.random.key(0), num_classes=10, reg_tokens=0
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    images = jax.random.normal(jax.random.key(1), (8, 3, 16, 16))
    labels, keys = jax.numpy.arange(8), jax.random.split(jax.random.key(3), 8)

    def loss(params, images, labels, keys):
        model = eqx.combine(params, static)
        logits = jax.vmap(lambda image, key: model(image, key=key, inference=False))(images, keys)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    check_recipe(params, loss, (images, labels, keys), mpmd.by_parameters(r"blocks/0/blocks/(\d+)"))
