"""Attention and its gradients as launches: the gradients read what is known of each row; against f64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.kernels.kernel_plan import ReduceNode
from mpmd.compile.thunks.thunk import AttentionThunk
from tests.support.native_fragments import fragment_of

pytest.importorskip("triton", reason="Triton is not installed: make test-gpu")

from tests.support.gpu_launches import run_program

SIZE, WIDTH = 72, 16
Q, K = np.arange(SIZE)[:, None], np.arange(SIZE)
MASKS = {
    "none": np.ones((SIZE, SIZE), bool),
    "causal": Q >= K,
    "causal from the fifth": Q + 5 >= K,
    "causal after the fifth": Q - 5 >= K,
    "a causal window": (Q >= K) & (Q - K < 9),
    "a window": abs(Q - K) < 20,
    "segments": (Q >= K) & (Q // 30 == K // 30),
    "left padding": (Q >= K) & (K > 40),
    "one key": Q == K,
}


def attend(seen, filler, guarded, narrow, q, k, v):
    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, groups, 1) for x in (k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(WIDTH)
    scores = jnp.where(seen, scores if narrow else scores.astype(jnp.float32), filler).astype(jnp.float32)
    if not guarded:
        weights = jax.nn.softmax(scores)
    else:
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        e = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True)
        weights = e / jnp.where(total == 0, 1, total)
    return jnp.einsum("bhqk,bhkd->bhqd", weights.astype(q.dtype), v)


def gradients(function, *arguments):
    value, pull = jax.vjp(function, *arguments)
    return value, *pull(jnp.flip(value, 0))


def reference(seen, q, k, v):
    """The value and the gradients in f64; queries that see nothing are 0."""
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(x, groups, 1) for x in (k, v))
    scores = np.where(seen, q @ wide_k.swapaxes(2, 3) / math.sqrt(WIDTH), -np.inf)
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    p = e / np.maximum(e.sum(-1, keepdims=True), 1e-300)
    return p @ wide_v, p


def backward(g, p, q, k, v):
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(x, groups, 1) for x in (k, v))
    dp = g @ wide_v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(WIDTH)
    found = ds @ wide_k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g
    return found[0], *(x.reshape(*k.shape[:2], groups, *x.shape[2:]).sum(2) for x in found[1:])


def heads(dtype, queries=2, keys=2, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, n, SIZE, WIDTH)).astype(dtype) for n in (queries, keys, keys)]


def check(seen, dtype, *, filler=-np.inf, guarded=False, narrow=True, queries=2, keys=2):
    """Launches against f64; returns the plans of attention."""
    arguments = heads(dtype, queries, keys)

    def function(*given):
        return gradients(lambda *a: attend(jnp.asarray(seen), filler, guarded, narrow, *a), *given)

    with jax.default_matmul_precision("highest"):
        fragment = fragment_of(function, *arguments)
    made = prepare_fragment(fragment, GpuTarget())
    found = [x.astype(np.float64) for x in run_program(made.program, fragment, arguments)]
    exact = [a.astype(np.float64) for a in arguments]
    value, p = reference(seen, *exact)
    g = np.flip(value, 0)
    if dtype != np.float32:
        g = g.astype(dtype).astype(np.float64)
    loose = 1e-5 if dtype == np.float32 else 2e-2
    for got, want in zip(found, (value, *backward(g, p, *exact)), strict=True):
        np.testing.assert_allclose(got, want, rtol=loose, atol=loose * max(1, abs(want).max()))
    plans = [t.plan for t in made.thunks if isinstance(t, AttentionThunk)]
    return plans, found


def goes_over_keys_once(plan):
    return not any(isinstance(n, ReduceNode) for n in plan.rows.nodes)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["none", "causal", "a causal window", "segments"])
def test_gradients_read_what_is_known_of_each_row(kind, dtype):
    """Maxima and totals from the kernel of the result, sum(g · p) from the result itself."""
    (forward, backward_plan), _ = check(MASKS[kind], dtype, filler=-1e9)
    assert not goes_over_keys_once(forward) and goes_over_keys_once(backward_plan)
    assert len(forward.rows.results) == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("filler", [-np.inf, -1e9])
def test_gradients_of_every_mask(kind, dtype, filler):
    """Queries that see nothing are 0 where the filler is -inf, as that is asked for."""
    if filler == -np.inf or MASKS[kind].any(-1).all():
        check(MASKS[kind], dtype, filler=filler, guarded=filler == -np.inf)


@pytest.mark.parametrize("guarded", [False, True])
def test_queries_of_a_group_share_keys(guarded):
    check(MASKS["causal"], jnp.bfloat16, guarded=guarded, narrow=False, queries=4, keys=2)


def test_rows_that_break_the_condition_go_over_all_keys():
    """Their own scores are as small as the filler: keys behind the mask count as much."""
    rng, seen, filler = np.random.default_rng(0), MASKS["causal"], -8192.0
    q, k, v = (rng.integers(-3, 4, (1, 2, SIZE, WIDTH)).astype(np.float32) for _ in range(3))
    q *= 2.0**14  # scores are exact, most weights 0 or 1

    def function(*given):
        return gradients(lambda *a: attend(jnp.asarray(seen), filler, False, True, *a), *given)

    with jax.default_matmul_precision("highest"):
        fragment = fragment_of(function, q, k, v)
    program = prepare_fragment(fragment, GpuTarget()).program
    scores = np.where(seen, q @ k.swapaxes(2, 3) / math.sqrt(WIDTH), filler).astype(np.float64)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    assert (p * ~seen).max() > 0.01
    g = np.flip(p @ v, 0)
    dp = g @ v.swapaxes(2, 3)
    ds = np.where(seen, p * (dp - (dp * p).sum(-1, keepdims=True)), 0) / math.sqrt(WIDTH)
    wanted = p @ v, ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g
    for got, want in zip(run_program(program, fragment, [q, k, v]), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * max(1, abs(want).max()))


def test_a_query_that_sees_one_key_has_no_gradient():
    """The row term is of the result that is stored, and what it is taken from is not rounded."""
    _, (_, dq, dk, _) = check(MASKS["one key"], jnp.bfloat16)
    assert max(abs(dq).max(), abs(dk).max()) < 1e-5
