"""Recipes for linen and nnx: separate layers, stacked layers run by a scan, rematerialised ones."""

from __future__ import annotations

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpmd
from tests.support.recipes import check_recipe, token_batch

pytestmark = pytest.mark.slow

LAYERS, WIDTH, WORDS = 4, 16, 32
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))), None


class LinenModel(nn.Module):
    scanned: bool
    remat: bool

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(WORDS, WIDTH)(ids) + self.param(
            "position", nn.initializers.normal(), (ids.shape[1], WIDTH)
        )
        mask = nn.make_causal_mask(ids)
        block = nn.remat(LinenBlock, prevent_cse=not self.scanned) if self.remat else LinenBlock
        if self.scanned:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=LAYERS,
            )
            x, _ = stack(name="layers")(x, mask)
        else:
            for i in range(LAYERS):
                x, _ = block(name=f"layers_{i}")(x, mask)
        return nn.Dense(WORDS)(nn.LayerNorm()(x))


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("scanned", [False, True], ids=["plain", "scanned"])
def test_linen(scanned, remat):
    model, ids = LinenModel(scanned, remat), token_batch(WORDS)
    params = model.init(jax.random.key(0), ids)

    def loss(params, ids):
        return cross_entropy(model.apply(params, ids)[:, :-1], ids[:, 1:]).mean()

    stages = mpmd.split("layers") if scanned else mpmd.by_parameters(r"layers_(\d+)")
    check_recipe(params, loss, (ids,), stages)


def test_linen_by_scopes_and_with_frozen_parameters():
    model, ids = LinenModel(scanned=False, remat=True), token_batch(WORDS)
    params = flax.core.freeze(model.init(jax.random.key(0), ids))

    def loss(params, ids):
        return cross_entropy(model.apply(params, ids)[:, :-1], ids[:, 1:]).mean()

    check_recipe(params, loss, (ids,), mpmd.by_scopes(r"layers_(\d+)"))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.inner, self.outer = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.outer(nnx.gelu(self.inner(self.norms[1](x))))


class NnxModel(nnx.Module):
    def __init__(self, scanned, remat, rngs):
        self.embed, self.head = nnx.Embed(WORDS, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WORDS, rngs=rngs)
        self.scanned, self.remat = scanned, remat
        if scanned:
            self.layers = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)(rngs.fork(split=LAYERS))
        else:
            self.layers = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, ids):
        run = nnx.remat(lambda x, layer: layer(x)) if self.remat else lambda x, layer: layer(x)
        x = self.embed(ids)
        if self.scanned:
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for layer in self.layers:
                x = run(x, layer)
        return self.head(x)


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("scanned", [False, True], ids=["plain", "scanned"])
def test_nnx(scanned, remat):
    model, ids = NnxModel(scanned, remat, nnx.Rngs(0)), token_batch(WORDS)
    definition, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, ids):
        logits = nnx.merge(definition, params, rest)(ids)
        return cross_entropy(logits[:, :-1], ids[:, 1:]).mean()

    stages = mpmd.split("layers") if scanned else mpmd.by_parameters(r"layers/(\d+)")
    check_recipe(params, loss, (ids,), stages)


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(x)))


class Mixture(nn.Module):
    """Each token goes to two of four experts, whose parameters are stacked by `nn.vmap`."""

    @nn.compact
    def __call__(self, x, _):
        weights, chosen = jax.lax.top_k(jax.nn.softmax(nn.Dense(4, name="router")(x)), 2)
        gates = (jax.nn.one_hot(chosen, 4) * weights[..., None]).sum(-2)
        experts = nn.vmap(
            Expert,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=-2,
            axis_size=4,
        )(name="experts")(x)
        return x + (experts * gates[..., None]).sum(-2), gates.mean((0, 1)).max()


class MixtureModel(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(WORDS, WIDTH)(ids)
        if self.scanned:
            stack = nn.scan(Mixture, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, balance = stack(name="layers")(x, None)
        else:
            balance = []
            for i in range(LAYERS):
                x, most = Mixture(name=f"layers_{i}")(x, None)
                balance.append(most)
        return nn.Dense(WORDS)(x), jnp.asarray(balance).sum()


@pytest.mark.parametrize("scanned", [False, True], ids=["plain", "scanned"])
def test_linen_mixture_of_experts(scanned):
    model, ids = MixtureModel(scanned), token_batch(WORDS)
    params = model.init(jax.random.key(0), ids)

    def loss(params, ids):
        logits, balance = model.apply(params, ids)
        return cross_entropy(logits[:, :-1], ids[:, 1:]).mean() + 1e-2 * balance

    stages = mpmd.split("layers") if scanned else mpmd.by_parameters(r"layers_(\d+)")
    check_recipe(params, loss, (ids,), stages)
