"""Fragments in as much memory as a device has left for them."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.options import CompileOptions
from mpmd.options import PipelineOptions
from tests.support.native_fragments import check_memory, fragment_of, run

ROWS, WIDTH = 64, 32


def kept(x, w):
    """Products whose inputs are cheap, and needed in the reverse order once more."""
    values = [jnp.cos(x + k) for k in range(8)]
    sums = sum(jnp.tanh(v @ w) for v in values)
    for v in reversed(values):
        sums = jnp.tanh((sums * v) @ w)
    return sums


ARGUMENTS = [np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32),
             np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6]  # fmt: skip
BORDER = ARGUMENTS[0].nbytes * 2 + ARGUMENTS[1].nbytes


def temporaries(options=None, reserved=0):
    fragment = dataclasses.replace(fragment_of(kept, *ARGUMENTS), reserved_bytes=reserved)
    made = prepare_fragment(fragment, NativeCpu(), options or CompileOptions())
    return made.assignment.arena_bytes


def test_values_are_computed_again_until_a_fragment_fits():
    free = temporaries()
    limit = free * 3 // 4
    fragment = fragment_of(kept, *ARGUMENTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = CompileOptions(memory_bytes=BORDER + limit)
        made = prepare_fragment(fragment, NativeCpu(), options).compiled()
    assert made.assignment.arena_bytes <= limit < free
    check_memory(made)
    np.testing.assert_allclose(
        run(fragment, ARGUMENTS, made)[0], jax.jit(kept)(*ARGUMENTS), rtol=1e-4, atol=1e-5
    )


def test_what_others_hold_meanwhile_counts():
    free = temporaries()
    memory = CompileOptions(memory_bytes=BORDER + free)
    assert temporaries(memory) == free
    assert temporaries(memory, reserved=free // 4) <= free - free // 4


def test_a_limit_that_cannot_be_met_is_said():
    options = CompileOptions(memory_bytes=BORDER + 100)
    with pytest.warns(
        UserWarning, match=r"(?s)fragment fragment on mesh needs .* and 100 are left.*most is held by"
    ):
        temporaries(options)
    with pytest.warns(UserWarning, match="and 0 are left"):
        temporaries(CompileOptions(memory_bytes=100))


def test_enough_memory_changes_nothing():
    assert temporaries(CompileOptions(memory_bytes=1 << 30)) == temporaries()


def test_the_option_reaches_fragments():
    config = mpmd.make_config(
        mpmd.make_topology({"m0": 1}),
        {"f": "m0"},
        backend="native",
        options=PipelineOptions(device_memory_bytes=1000),
    )
    step = mpmd.jit(lambda *a: mpmd.named_computation(kept, name="f")(*a), config)
    with pytest.warns(UserWarning, match="the device has 1,000 bytes"):
        compiled = step.compiled(*ARGUMENTS)
    np.testing.assert_allclose(compiled(*ARGUMENTS), jax.jit(kept)(*ARGUMENTS), rtol=1e-4, atol=1e-5)


def normed(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def trained_block(q, k, v, o, u, w, x):
    """A transformer block with its gradients: fusions of several results, parts of which have no kernel."""

    def loss(q, k, v, o, u, w, x):
        queries, keys, values = (jnp.einsum("btd,dhk->bhtk", normed(x), p) for p in (q, k, v))
        scores = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", queries, keys) / 8)
        x = x + jnp.einsum("bhtk,hkd->btd", jnp.einsum("bhts,bhsk->bhtk", scores, values), o)
        return ((x + jax.nn.gelu(normed(x) @ u) @ w) ** 2).mean()

    return jax.tree.leaves(jax.value_and_grad(loss, argnums=tuple(range(7)))(q, k, v, o, u, w, x))


@pytest.mark.parametrize("share", [0.75, 0.5])
@pytest.mark.filterwarnings("ignore:fragment")
def test_only_what_has_a_kernel_is_computed_again(share):
    heads, random = (64, 4, 16), np.random.default_rng(0)
    dims = [heads, heads, heads, (4, 16, 64), (64, 256), (256, 64), (4, 32, 64)]
    arguments = [(random.standard_normal(d) * 0.05).astype(np.float32) for d in dims]
    fragment = fragment_of(trained_block, *arguments)
    assignment = prepare_fragment(fragment, NativeCpu()).assignment
    border = sum(a.size for a in assignment.allocations if a.kind != "arena")
    options = CompileOptions(memory_bytes=border + int(assignment.arena_bytes * share))
    made = prepare_fragment(fragment, NativeCpu(), options).compiled()
    assert made.assignment.arena_bytes < assignment.arena_bytes
    check_memory(made)
    wanted = jax.jit(trained_block)(*arguments)
    for got, want in zip(run(fragment, arguments, made), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
