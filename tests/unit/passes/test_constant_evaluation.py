"""What is known of integers before a program runs is what jax computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpmd import ir
from mpmd.passes.constant_evaluation import MAX_ELEMENTS, ConstantEvaluator
from mpmd.tracing.trace import to_module

TABLE = np.array([[5, -7, 2], [1, 0, -3]], np.int32)
KNOWN = {
    "division": lambda: jnp.array([7, -7, 8]) // jnp.array([-2, 2, 3]),
    "towards_zero": lambda: lax.div(jnp.array([7, -7, 8]), jnp.array([-2, 2, 3])),
    "remainder": lambda: lax.rem(jnp.array([7, -7, 8]), jnp.array([-2, 2, 3])),
    "modulo": lambda: jnp.array([7, -7, 8]) % 3,
    "wraps": lambda: jnp.uint8(200) + jnp.uint8(100),
    "negative_wraps": lambda: -jnp.uint8(3),
    "smallest": lambda: lax.div(jnp.int32(-(2**31)), jnp.int32(-1)),
    "clamped": lambda: lax.clamp(0, jnp.array([-3, 2, 9]), 4),
    "slice": lambda: jnp.asarray(TABLE)[1, ::2],
    "past_the_end": lambda: lax.dynamic_slice(jnp.asarray(TABLE), (1, 2), (1, 2)),
    "updated": lambda: lax.dynamic_update_slice(jnp.asarray(TABLE), jnp.array([[9, 9]]), (5, 5)),
    "transposed": lambda: jnp.transpose(jnp.asarray(TABLE))[::-1],
    "broadcast": lambda: jnp.broadcast_to(jnp.arange(3)[:, None], (2, 3, 4)),
    "transposed_broadcast": lambda: lax.broadcast_in_dim(jnp.asarray(TABLE), (3, 4, 2), (2, 0)),
    "joined": lambda: jnp.concatenate([jnp.asarray(TABLE), jnp.ones((1, 3), jnp.int32)]),
    "iota": lambda: lax.broadcasted_iota(jnp.int32, (2, 3), 1),
    "flags": lambda: jnp.logical_xor(jnp.arange(4) < 2, jnp.array([True, False, True, False])),
    "sum_of_flags": lambda: jnp.array([True, False]) | (jnp.arange(2) == 1),
    "chosen": lambda: jnp.where(jnp.arange(3) > 0, jnp.asarray(TABLE)[0], 4),
    "narrowed": lambda: jnp.array([300, -1]).astype(jnp.int8),
    "floats_compared": lambda: jnp.array([0.5, np.nan]) >= jnp.float32(0.5),
    "sign": lambda: jnp.sign(jnp.asarray(TABLE)) * jnp.abs(jnp.asarray(TABLE)),
    "behind_a_barrier": lambda: lax.optimization_barrier((jnp.arange(2), jnp.arange(3)))[1],
}
UNKNOWN = {
    "argument": lambda x: x,
    "division_by_zero": lambda x: lax.div(jnp.int32(3), jnp.int32(0)),
    "arithmetic_of_floats": lambda x: jnp.float32(3.0) * 2.0,
    "rounding": lambda x: jnp.full(2, 2.5).astype(jnp.int32),
    "too_large": lambda x: jnp.arange(MAX_ELEMENTS + 1),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, jnp.int32(1)),
}


def evaluated(fn, *args):
    """What the evaluator finds for the result of a function, all of whose calls are inlined."""
    lowered = jax.jit(fn, keep_unused=True).lower(*args)
    module = to_module(lowered, ir.TopologyAttr.from_axes({"m": {"x": 1}}))
    with ir.context():
        return ConstantEvaluator(module).array(ir.symbol_table(module)["main"].returned[0])


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_array_is_that_of_jax(name):
    with jax.disable_jit():
        want = np.asarray(KNOWN[name]())
    got = evaluated(KNOWN[name])
    assert got is not None and got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_arguments_or_on_rounding_is_unknown(name):
    assert evaluated(UNKNOWN[name], jnp.int32(1)) is None


@pytest.mark.slow
def test_a_long_chain_of_updates_needs_no_recursion():
    def chain():
        found = jnp.zeros(3, jnp.int32)
        for i in range(3000):
            found = lax.dynamic_update_slice(found, jnp.full(1, i), (i % 3,))
        return found

    np.testing.assert_array_equal(evaluated(chain), [2997, 2998, 2999])
