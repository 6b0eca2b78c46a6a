"""bf16 values that cancel in JAX, operation by operation, cancel in kernels: both are rounded, or none is."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.passes.fusion import KeepRounding
from mpmd.compile.thunks.thunk import AttentionThunk
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.native_functions import Floats

BF16 = ml_dtypes.bfloat16
floats = Floats()
FIRST = np.arange(40) == 0  # the one element of each row with a weight


def scaled(x):
    return x * jnp.asarray(1.3, x.dtype)


def minus_sum(x):
    u = scaled(x)
    return u - jnp.where(FIRST, u, 0).sum(-1, keepdims=True)


def minus_sum_of_columns(x):
    """Columns are added up by a kernel of their own, which rounds them."""
    u = scaled(x)
    first = jnp.where(np.arange(len(x))[:, None] == 0, u, 0)
    return (u - jax.lax.reduce(first, np.zeros((), x.dtype), jax.lax.add, (0,))).T


def through_f32(x):
    u = scaled(x)
    return u - (u.astype(jnp.float32) + jnp.where(FIRST, 0.0, 1.0)).astype(x.dtype)


def share(x):
    e = jnp.exp(scaled(x)) * FIRST
    return e / e.sum(-1, keepdims=True)


CASES = {
    "sum": minus_sum,
    "sum of columns": minus_sum_of_columns,
    "through f32": through_f32,
    "beside a constant": lambda x: 1 - share(x),
    "log": lambda x: jnp.log(share(x)),
    "log-plus-one": lambda x: 1 / jnp.log1p(-share(x)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cancels_is_zero(name):
    x = floats(16, 40, dtype=BF16)
    fragment = fragment_of(CASES[name], x)
    (found,) = run(fragment, [x], compiled(fragment))
    assert not found[:, 0].any()


def attend(q, k, v):
    """Each query sees its own key; the others are behind a filler.  Some weights are dropped."""
    s = jnp.einsum("bqd,bkd->bqk", q, k)
    s = jnp.where(jnp.eye(q.shape[1], dtype=bool), s, jnp.asarray(-1e9, q.dtype))
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(s) / 0.8, v)


def test_a_query_that_sees_one_key_has_no_gradient():
    def gradients(q, k, v):
        return jax.vjp(lambda q, k: attend(q, k, v), q, k)[1](v)

    arguments = [floats(2, 9, 8, dtype=BF16) for _ in range(3)]
    fragment = fragment_of(gradients, *arguments)
    made = compiled(fragment)
    assert any(isinstance(t, AttentionThunk) for t in made.thunks)
    for found in run(fragment, arguments, made):
        assert not found.any()


def test_without_the_pass_something_is_left(monkeypatch):
    monkeypatch.setattr(KeepRounding, "rewrite", lambda self, module: False)
    x = floats(16, 40, dtype=BF16)
    fragment = fragment_of(minus_sum, x)
    (found,) = run(fragment, [x], compiled(fragment))
    assert found[:, 0].any()
