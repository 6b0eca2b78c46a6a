"""Elementary functions where they end: saturated, infinite, undefined, denormal; in threads of XLA, too."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import special

import mpmd

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
FAR = [-np.inf, -60000.0, -1000.0, -100.0, -9.5, -9.03, 9.03, 9.5, 100.0, 1000.0, 60000.0, np.inf]
EXACT = {
    "exponential": (jnp.exp, np.exp),
    "exponential-minus-one": (jnp.expm1, np.expm1),
    "log": (jnp.log, np.log),
    "log-plus-one": (jnp.log1p, np.log1p),
    "logistic": (jax.nn.sigmoid, special.expit),
    "tanh": (jnp.tanh, np.tanh),
    "erf": (jax.lax.erf, special.erf),
    "sine": (jnp.sin, np.sin),
    "cosine": (jnp.cos, np.cos),
    "sqrt": (jnp.sqrt, np.sqrt),
    "rsqrt": (jax.lax.rsqrt, lambda x: 1 / np.sqrt(x)),
    "cbrt": (jnp.cbrt, np.cbrt),
}


def native(function, *arguments):
    """By way of XLA, whose threads flush denormals."""
    config = mpmd.make_config(mpmd.make_topology({"m": 1}), {"f": "m"}, backend="native")
    named = mpmd.named_computation(function, name="f")
    return [np.asarray(v) for v in jax.tree.leaves(mpmd.jit(lambda *a: named(*a), config)(*arguments))]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients_of_outlying_activations(dtype):
    x = np.array([v for v in FAR if np.isfinite(v)], DTYPES[dtype])
    gelu = jax.vmap(jax.grad(lambda v: jax.nn.gelu(v, approximate=True)))
    exact_gelu = jax.vmap(jax.grad(lambda v: jax.nn.gelu(v, approximate=False)))
    for found in native(lambda x: (gelu(x), exact_gelu(x), jax.vmap(jax.grad(jax.nn.silu))(x)), x):
        np.testing.assert_allclose(found.astype(np.float64), x > 0, atol=1e-2)


@pytest.mark.fast_cases("f32", "bf16")
@pytest.mark.parametrize("dtype", DTYPES)
def test_ends(dtype):
    own = DTYPES[dtype]
    largest = float(ml_dtypes.finfo(own).max)
    x = np.array([*FAR, np.nan, 0.0, -0.0, -1.0, 1.0, largest, -largest], np.float64).astype(own)
    found = native(lambda x: [f(x) for f, _ in EXACT.values()], x)
    with np.errstate(all="ignore"):
        for (name, (_, reference)), got in zip(EXACT.items(), found, strict=True):
            want = reference(x.astype(np.float64)).astype(own).astype(np.float64)
            np.testing.assert_allclose(
                got.astype(np.float64),
                want,
                rtol=4 * float(ml_dtypes.finfo(own).eps),
                atol=1e-37,
                err_msg=name,
            )
            zeros = x == 0
            np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]), err_msg=name)


def test_odd_functions_keep_denormals():
    x = np.array([1e-40, -1e-40, 1e-45, -3e-39], np.float32)
    functions = (jnp.tanh, jnp.expm1, jnp.log1p, jnp.sin)
    for found in native(lambda x: [f(x) for f in functions], x):
        np.testing.assert_array_equal(found.view(np.int32), x.view(np.int32))


def test_halves_are_rounded_away_from_zero():
    x = np.array([0.49999997, 0.5, 1.5, 2.5, 8388607.5, 8388609.0, -0.0, np.inf], np.float32)
    want = np.array([0, 1, 2, 3, 8388608, 8388609, -0.0, np.inf], np.float32)
    (found,) = native(lambda x: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO), np.stack([x, -x]))
    np.testing.assert_array_equal(found, np.stack([want, -want]))
    np.testing.assert_array_equal(np.signbit(found), np.signbit(np.stack([x, -x])))
