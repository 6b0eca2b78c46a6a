"""JAX keeps nothing of a step that was traced, lowered and compiled, when nothing else does."""

import gc
import weakref

import jax
import jax.numpy as jnp

from mpmd.jax_compat import lower

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def test_a_lowered_function_is_released_with_its_executable():
    traced = jax.jit(lambda x, unused: jnp.tanh(x) @ x, keep_unused=True).trace(X, X)
    lowered = lower(traced)
    compiled = lowered.compile()
    assert compiled(jnp.ones((4, 4)), jnp.ones((4, 4))).shape == (4, 4)
    held = weakref.ref(traced.jaxpr)  # what JAX's caches of executables are kept by
    del traced, lowered, compiled
    gc.collect()
    assert held() is None
