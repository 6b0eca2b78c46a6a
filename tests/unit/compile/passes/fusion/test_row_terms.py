"""What gradients of attention read of each row, on a device where that pays; the numbers stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.target import gpu_pipeline
from mpmd.compile.lowering import lower
from mpmd.compile.options import CompileOptions
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.cost.device import H200, HOST
from tests.support.hlo_meaning import evaluate

Q, K, V = (np.random.default_rng(k).standard_normal((2, 3, 6, 4)).astype(np.float32) for k in range(3))


def softmax(q, k):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def attend(q, k, v):
    return softmax(q, k) @ v


def gradients(function):
    def both(*given):
        value, pull = jax.vjp(function, *given)
        return value, *pull(jnp.flip(value, 0))

    return both


def stitched(function, *arguments, device=H200):
    """A program after the pass, prepared as for a GPU, and what it computed before."""
    module = lower(jax.jit(function).lower(*arguments).compiler_ir("stablehlo"))
    want = jax.tree.leaves(evaluate(module, list(arguments))) if device is H200 else []
    for each in gpu_pipeline(1, CompileOptions(), H200):
        if isinstance(each, AttentionStitching):
            break
        each.run(module)
    AttentionStitching(device=device).run(module)
    return module, want


def reductions(function, *arguments, device=H200):
    """How many reductions each kernel makes, and how many are made outside; the numbers stay."""
    module, want = stitched(function, *arguments, device=device)
    for got, wanted in zip(jax.tree.leaves(evaluate(module, list(arguments))) if want else [], want):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
    kernels = [i for i in module.entry.post_order() if i.opcode == "fusion"]
    inside = [sum(i.opcode == "reduce" for i in k.called[0]) for k in kernels]
    return inside, sum(i.opcode == "reduce" for i in module.entry)


def test_gradients_read_maxima_totals_and_the_row_term():
    """The term is a sum over columns outside, of the result and its gradient."""
    assert reductions(gradients(attend), Q, K, V) == ([2, 0], 1)
    assert reductions(gradients(attend), Q, K, V, device=HOST) == ([2, 3], 0)


def test_a_result_may_have_its_columns_first_or_be_moved():
    def turned(q, k, v):
        return jnp.einsum("bhkd,bhqk->bhdq", v, softmax(q, k))

    def moved(q, k, v):
        return attend(q, k, v).transpose(0, 2, 1, 3).reshape(2, 6, 12)

    for function in (turned, moved):
        assert reductions(gradients(function), Q, K, V) == ([2, 0], 1)


def test_queries_that_see_nothing_have_a_total_of_one():
    def guarded(q, k, v):
        seen = jnp.arange(6)[:, None] > jnp.arange(6)
        scores = jnp.where(seen, jnp.einsum("bhqd,bhkd->bhqk", q, k), -jnp.inf)
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        e = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True)
        return (e / jnp.where(total == 0, 1, total)) @ v

    assert reductions(gradients(guarded), Q, K, V) == ([2, 0], 1)


def other_scale(q, k, v):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)) / 2)
    return (e / e.sum(-1, keepdims=True)) @ v


def of_other_values(q, k, v):
    """The result and the scores' gradient are of different values."""
    p = softmax(q, k)
    return p @ v + jnp.tanh(p @ jnp.flip(v, -1))


def weighted(q, k, v):
    """The weights of the result are not the softmax alone."""
    return (softmax(q, k) * jnp.abs(jnp.sin(jnp.arange(6.0)))) @ v


@pytest.mark.parametrize("function", [other_scale, weighted])
def test_sums_of_other_weights_stay_what_they_are(function):
    inside, outside = reductions(gradients(function), Q, K, V)
    assert inside[-1] and not outside


def test_results_of_other_values_stay_what_they_are():
    reductions(gradients(of_other_values), Q, K, V)


def test_totals_of_numbers_that_may_be_denormal_are_divided_by():
    """As their reciprocals may be infinite."""
    module, _ = stitched(gradients(other_scale), Q, K, V)
    text = [i for c in module.computations for i in c if i.opcode == "divide"]
    assert any(i.operands[0].opcode not in ("broadcast", "constant") for i in text)


def test_a_maximum_that_anything_replaces_bounds_no_exponential():
    """Far below what replaces it exponentials and their total are denormal."""

    def replaced(q, k, v):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        e = jnp.exp(scores - jnp.where(top > 1e9, top, 92.0))
        return (e / e.sum(-1, keepdims=True)) @ v

    module, want = stitched(replaced, Q, K, V)
    assert np.isfinite(want[0]).all()
    np.testing.assert_allclose(jax.tree.leaves(evaluate(module, [Q, K, V]))[0], want[0], rtol=1e-4, atol=1e-5)


def test_maxima_of_other_values_bound_no_exponential():
    def shifted(q, k, v):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        e = jnp.exp(scores - jax.lax.stop_gradient((scores * 0.25).max(-1, keepdims=True)))
        return (e / e.sum(-1, keepdims=True)) @ v

    inside, outside = reductions(gradients(shifted), Q, K, V)
    assert inside[-1] and not outside


def across(q, k, v):
    """There are as many batches as heads, and another result pairs them the other way."""
    p = softmax(q, k)
    other = jax.lax.stop_gradient(p @ v)
    return other + jnp.einsum("bhqk,hbkd->bhqd", p, v)


def test_the_batch_of_values_is_in_the_order_of_the_weights():
    reductions(gradients(across), *(np.concatenate([x, 2 * x])[:3] for x in (Q, K, V)))


def test_another_result_of_the_values_is_not_taken():
    def beside(q, k, v):
        other = jax.nn.sigmoid(jnp.einsum("bhqd,bhkd->bhqk", q, k)) @ v
        return jax.lax.stop_gradient(other) + attend(q, k, v)

    assert reductions(gradients(beside), Q, K, V) == ([2, 0], 1)


def test_scores_are_as_exact_as_the_row_term():
    """Where a query sees one key its gradient is zero: that is no difference of rounded and other sums."""

    def one(q, k, v):
        scores = jnp.where(jnp.eye(6, dtype=bool), jnp.einsum("bhqd,bhkd->bhqk", q, k), -jnp.inf)
        return jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.bfloat16) @ v

    arguments = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    module, _ = stitched(gradients(one), *arguments)
    kinds = [
        i.shape.dtype for c in module.computations for i in c if i.opcode == "dot" and i.shape.dims[-1] == 6
    ]
    assert sorted(kinds) == ["bf16", "bf16", "f32"]
    _, dq, dk, _ = jax.tree.leaves(evaluate(module, arguments))
    assert abs(dq.astype(np.float32)).max() < 1e-6 and abs(dk.astype(np.float32)).max() < 1e-6


def test_what_is_read_of_a_row_has_the_digits_of_f32():
    """A maximum of bf16 is rounded in memory, and not in a kernel: each makes its own."""

    def narrow(q, k, v):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        e = jnp.exp((scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))).astype(jnp.float32))
        return (e / e.sum(-1, keepdims=True)).astype(jnp.bfloat16) @ v

    module, _ = stitched(gradients(narrow), *(x.astype(jnp.bfloat16) for x in (Q, K, V)))
    kernels = [i.called[0] for i in module.entry.post_order() if i.opcode == "fusion"]
    kinds = [sorted(i.shape.dtype for i in k if i.opcode == "reduce") for k in kernels]
    assert kinds == [["bf16", "f32"]] * 2
