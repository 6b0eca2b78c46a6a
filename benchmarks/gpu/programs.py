"""The programs of the comparison with XLA: steps of GPT-2 124M and of a Llama, their parts, other models'."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import llama
from benchmarks.gpu.llama import LlamaSize
from examples.workloads.fragments import (
    adam,
    block,
    experts,
    gradients,
    head,
    mlp,
    norm,
)


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Sizes of the language model."""

    batch: int = 8
    tokens: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    vocabulary: int = 50257


SMALL = ModelSize(batch=1, tokens=8, width=16, heads=2, layers=1, vocabulary=32)
"""For the stand-in."""


def step_sizes(size: ModelSize) -> dict[str, ModelSize]:
    """Name → size of the steps of a first call: one that XLA compiles quickly, and the whole."""
    return {"step_of_two_layers": dataclasses.replace(size, layers=min(2, size.layers)), "step": size}


@dataclasses.dataclass(frozen=True)
class ComparedProgram:
    """A program that both compilers are given.

    Attributes:
        name: in the table.
        function: takes and returns flat lists of arrays.
        arguments: their shapes.
        donated: arguments whose memory results may take.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...] = ()


def programs(size: ModelSize, large: LlamaSize) -> list[ComparedProgram]:
    """All programs: of GPT-2's size, then of a Llama."""
    b, t, d, v = size.batch, size.tokens, size.width, size.vocabulary
    x, layer = _bf16(b, t, d), functools.partial(block, size.heads)
    weights = _layer_shapes(d, _bf16)
    patches = _bf16(32, 256, d)
    image_layer = gradients(functools.partial(_open_block, size.heads), 13)
    moments = [a for shape in parameter_shapes(size) for a in [_f32(*shape.shape)] * 4]
    donated = tuple(k for k in range(len(moments)) if k % 4 < 3)
    loss, labels = _f32(), jax.ShapeDtypeStruct((b, t), jnp.int32)
    return [
        training_step(size),
        ComparedProgram("block", gradients(layer, 13), (x, *weights, x)),
        ComparedProgram("mlp", gradients(mlp, 5), (x, *weights[8:], x)),
        ComparedProgram("head", gradients(head, 2), (x, _bf16(v, d), labels, loss)),
        ComparedProgram("vit", image_layer, (patches, *weights, patches)),
        ComparedProgram("experts", gradients(experts, 3), (x, _bf16(d, 4), _bf16(4, d, d), x)),
        ComparedProgram("ragged", gradients(llama.ragged_experts, 4), (x, *_ragged_shapes(d), x)),
        ComparedProgram("adam", adam, tuple(moments), donated),
        llama_block(large),
        llama_step(large),
    ]


def _ragged_shapes(d: int) -> list[jax.ShapeDtypeStruct]:
    """A router, and eight experts of two products."""
    return [_bf16(d, 8), _bf16(8, d, 4 * d), _bf16(8, 4 * d, d)]


def llama_block(size: LlamaSize) -> ComparedProgram:
    """A block, forward and backward."""
    weights = [_bf16(*shape) for shape in llama.layer_shapes(size)]
    x = _bf16(size.batch, size.tokens, size.width)
    layer = functools.partial(llama.block, size)
    return ComparedProgram("llama_block", gradients(layer, len(weights) + 1), (x, *weights, x))


def llama_step(size: LlamaSize) -> ComparedProgram:
    """A training step that is scanned over its layers."""
    layers = [_f32(size.layers, *shape) for shape in llama.layer_shapes(size)]
    shapes = [_f32(size.vocabulary, size.width), _f32(size.width), *layers]
    tokens = jax.ShapeDtypeStruct((size.batch, size.tokens), jnp.int32)
    return _training("llama_step", functools.partial(llama.loss, size), shapes, tokens)


def parameter_shapes(size: ModelSize) -> list[jax.ShapeDtypeStruct]:
    """The parameters: two tables, a norm, and 12 arrays a layer."""
    ends = [_f32(size.vocabulary, size.width), _f32(size.tokens, size.width), *[_f32(size.width)] * 2]
    return [*ends, *_layer_shapes(size.width, _f32) * size.layers]


def _layer_shapes(d: int, kind: Callable[..., Any]) -> list[Any]:
    inner = [kind(d, 4 * d), kind(4 * d), kind(4 * d, d), kind(d)]
    return [kind(d), kind(d), kind(d, 3 * d), kind(3 * d), kind(d, d), kind(d), kind(d), kind(d), *inner]


def training_step(size: ModelSize) -> ComparedProgram:
    """A training step of GPT-2."""
    tokens = jax.ShapeDtypeStruct((size.batch, size.tokens), jnp.int32)
    return _training("step", functools.partial(_loss, size), parameter_shapes(size), tokens)


def _training(
    name: str, loss: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct], tokens: jax.ShapeDtypeStruct
) -> ComparedProgram:
    """A training step: bf16 activations, f32 weights and Adam."""
    count = len(shapes)

    def step(*given: Any) -> list[Any]:
        p, m, v = (list(given[k * count : (k + 1) * count]) for k in range(3))
        turn, words, labels = given[-3:]
        value, g = jax.value_and_grad(loss)(p, words, labels)
        turn = turn + 1
        c1, c2 = 1 - 0.9**turn, 1 - 0.999**turn
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g)]
        v = [0.999 * a + 0.001 * b * b for a, b in zip(v, g)]
        p = [a - 6e-4 * (b / c1) / (jnp.sqrt(c / c2) + 1e-8) for a, b, c in zip(p, m, v)]
        return [*p, *m, *v, turn, value]

    return ComparedProgram(name, step, (*shapes * 3, _f32(), tokens, tokens), tuple(range(3 * count + 1)))


def step_arguments(size: ModelSize) -> list[np.ndarray]:
    """The arrays of a step: parameters, both moments, count; tokens, labels."""
    rng = np.random.default_rng(0)
    *state, _, tokens, labels = training_step(size).arguments
    count = len(state) // 3

    def weights(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)

    moments = [np.zeros(a.shape, np.float32) for a in state[count:]]
    words = [rng.integers(0, size.vocabulary, a.shape).astype(np.int32) for a in (tokens, labels)]
    return [*(weights(a.shape) for a in state[:count]), *moments, np.zeros((), np.float32), *words]


def _loss(size: ModelSize, p: list[Any], tokens: Any, labels: Any) -> Any:
    table, places, scale, shift, *layers = p
    narrow = table.astype(jnp.bfloat16)
    x = narrow[tokens] + places.astype(jnp.bfloat16)
    for at in range(0, len(layers), 12):
        given = layers[at : at + 12]
        norms = (0, 1, 6, 7)
        x = block(size.heads, x, *(a if k in norms else a.astype(x.dtype) for k, a in enumerate(given)))
    return head(norm(x, scale, shift), narrow, labels)


def _open_block(heads: int, x: Any, *p: Any) -> Any:
    """A block of a ViT: every patch attends to all."""
    y = _open_attention(heads, norm(x, p[0], p[1]), p[2], p[3])
    x = x + y @ p[4] + p[5]
    return x + mlp(norm(x, p[6], p[7]), *p[8:12])


def _open_attention(heads: int, x: Any, w: Any, bias: Any) -> Any:
    q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in jnp.split(x @ w + bias, 3, -1))
    return jax.nn.dot_product_attention(q, k, v).reshape(x.shape)


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
