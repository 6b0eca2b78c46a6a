"""Which products and rows are one kernel, and what keeps them apart."""

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering import lower
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from tests.support.hlo_meaning import evaluate

Q, K, V = (
    np.random.default_rng(k).standard_normal((2, n, 4)).astype(np.float32) for k, n in enumerate((5, 5, 5))
)


def weights(q, k):
    e = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k))
    return e / e.sum(-1, keepdims=True)


def stitched(function, *arguments, change=None):
    """The number of kernels after the pass, which keeps the numbers."""
    module = lower(jax.jit(function).lower(*arguments).compiler_ir("stablehlo"))
    if change:
        change(module)
    want = jax.tree.leaves(evaluate(module, list(arguments)))
    AttentionStitching().run(module)
    for got, wanted in zip(jax.tree.leaves(evaluate(module, list(arguments))), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    return sum(i.opcode == "fusion" for i in module.entry)


def test_what_is_ordered_by_itself_is_no_part_of_a_kernel():
    def attend(q, k, v):
        return weights(q, k) @ v

    def order(module):
        inner = next(i for i in module.entry if i.opcode == "exponential")
        first = module.entry.parameters[2]
        inner.add_control_predecessor(module.entry.add(HloInstruction("negate", first.shape, [first])))

    assert stitched(attend, Q, K, V) == 1
    assert stitched(attend, Q, K, V, change=order) == 0


def test_rows_are_added_up_along_their_keys():
    """There are as many queries as keys: only the dim tells the sums apart."""

    def across(q, k, v):
        e = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k))
        return (e / e.sum(1, keepdims=True)) @ v

    def turned(q, k, v):
        e = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k))
        return (e / e.sum(-1)[:, None, :]) @ v

    assert stitched(across, Q, K, V) == 0
    assert stitched(turned, Q, K, V) == 0


def test_a_factor_is_mixed_as_it_lies():
    def mixed_by_query(q, k, v):
        return jnp.einsum("bqk,bqd->bkd", weights(q, k), v)

    def over_the_batch(q, k, v):
        return jnp.einsum("bqk,kbd->qd", weights(q, k), v.transpose(1, 0, 2))

    def by_batch(q, k, v):
        return jnp.einsum("bqk,qkd->bd", weights(q, k), jnp.ones((5, 5, 3), np.float32) * v[:1, :, :3])

    assert stitched(mixed_by_query, Q, K, V) == 1
    assert stitched(over_the_batch, Q, K, V) == 0
    assert stitched(by_batch, Q, K, V) == 0


def test_inputs_do_not_depend_on_results():
    """The second product's factor is computed from the first's result."""

    def circle(q, k, v):
        p = weights(q, k)
        mixed = p @ v
        return mixed, jnp.einsum("bqk,bkd->bqd", p * 2, jnp.sort(mixed, axis=-1))

    assert stitched(circle, Q, K, V) >= 1


def test_kernels_do_not_wait_for_each_other():
    """Each of two groups mixes what the other computes: one of both is computed as before."""

    def crossed(q, k, v):
        first, second = weights(q, k), weights(k, q)
        a, b = first @ v, second @ k
        return second @ jnp.sort(a, axis=-1), first @ jnp.sort(b, axis=-1), a, b

    assert stitched(crossed, Q, K, V) == 1


def test_groups_of_other_scores_stay_apart():
    def two(q, k, v):
        return weights(q, k) @ v, weights(k, q) @ v

    def one(q, k, v):
        p = weights(q, k)
        return p @ v, jnp.einsum("bqk,bqd->bkd", p, v)

    assert stitched(two, Q, K, V) == 2
    assert stitched(one, Q, K, V) == 1
