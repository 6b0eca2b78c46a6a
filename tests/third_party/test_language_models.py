"""Recipes for published language models, in small sizes: Gemma, GPT-2, BERT, Qwen3, a mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpmd
from tests.support.recipes import check_recipe, token_batch

pytestmark = pytest.mark.slow

WORDS = 64
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def test_gemma():
    """Source: google-deepmind/gemma:gemma/gm/nn/_config.py."""
    modules = pytest.importorskip("gemma.gm.nn._modules")
    from gemma import gm
    from gemma.gm.nn import _config

    kinds = [modules.AttentionType.LOCAL_SLIDING, modules.AttentionType.GLOBAL] * 2
    config = _config.TransformerConfig(
        num_embed=WORDS, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        final_logit_softcap=30.0, use_post_attn_norm=True, use_post_ffw_norm=True, attention_types=kinds,
        sliding_window_size=8, use_qk_norm=True,
    )  # fmt: skip
    model, ids = gm.nn.Transformer(config=config, dtype=jnp.float32, tokens="ids"), token_batch(WORDS)
    params = model.init(jax.random.key(0), ids[:1])["params"]

    def loss(params, ids):
        return cross_entropy(model.apply({"params": params}, ids).logits[:, :-1], ids[:, 1:]).mean()

    tied = [(WORDS, 32)]
    check_recipe(params, loss, (ids,), mpmd.by_parameters(r"layer_(\d+)"), tied=tied)
    check_recipe(params, loss, (ids,), mpmd.by_scopes(r"layer_(\d+)"), tied=tied)


def test_gpt2_of_transformers():
    """Source: huggingface/transformers:src/transformers/models/gpt2/modeling_flax_gpt2.py."""
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_flax_gpt2")
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=4, n_head=4,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    model, ids = modeling.FlaxGPT2LMHeadModel(config, input_shape=(1, 12), seed=0), token_batch(WORDS)

    def loss(params, ids, keys):
        logits = model(ids, params=params, train=True, dropout_rng=keys[0]).logits
        return cross_entropy(logits[:, :-1], ids[:, 1:]).mean()

    keys = jax.random.split(jax.random.key(1), 8)
    check_recipe(model.params, loss, (ids, keys), mpmd.by_parameters(r"h/(\d+)"), tied=[(WORDS, 32)])


def test_bert_of_transformers():
    """Source: huggingface/transformers:src/transformers/models/bert/modeling_flax_bert.py."""
    modeling = pytest.importorskip("transformers.models.bert.modeling_flax_bert")
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    model, ids = modeling.FlaxBertForMaskedLM(config, input_shape=(1, 12), seed=0), token_batch(WORDS)

    def loss(params, ids, keys):
        return cross_entropy(model(ids, params=params, train=True, dropout_rng=keys[0]).logits, ids).mean()

    keys = jax.random.split(jax.random.key(1), 8)
    stages = mpmd.by_parameters(r"encoder/layer/(\d+)")
    check_recipe(model.params, loss, (ids, keys), stages, tied=[(WORDS, 32)])


def test_qwen3_of_tunix():
    """Source: google/tunix:tunix/models/qwen3/model.py."""
    qwen3 = pytest.importorskip("tunix.models.qwen3.model")
    config = qwen3.ModelConfig(
        num_layers=4, vocab_size=WORDS, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=10000, norm_eps=1e-6,
    )  # fmt: skip
    definition, params = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    ids = token_batch(WORDS)

    def loss(params, ids):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((ids.shape[1],) * 2, bool)), (*ids.shape, ids.shape[1]))
        logits, _ = nnx.merge(definition, params)(ids, positions, None, mask)
        return cross_entropy(logits[:, :-1].astype(jnp.float32), ids[:, 1:]).mean()

    check_recipe(params, loss, (ids,), mpmd.by_parameters(r"layers/(\d+)"))


def test_mixture_of_experts_of_nano_moe():
    nano_moe = pytest.importorskip("nano_moe.model")
    from nano_moe.config import NanoMoEConfig

    config = NanoMoEConfig(WORDS, n_layers=4, n_heads=4, d_model=32, d_ff=64, block_size=16)
    model, ids = nano_moe.NanoMoE(config), token_batch(WORDS)
    params = model.init(jax.random.key(0), ids)

    def loss(params, ids, keys):
        logits, balance = model.apply(params, ids, deterministic=False, rngs={"dropout": keys[0]})
        return cross_entropy(logits[:, :-1], ids[:, 1:]).mean() + 0.01 * balance

    keys = jax.random.split(jax.random.key(1), 8)
    check_recipe(params, loss, (ids, keys), mpmd.by_parameters(r"block_(\d+)"))
