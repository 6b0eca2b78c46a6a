"""Buckets, comparisons and indices made of bf16 agree with JAX, operation by operation."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.precision import without_rounding
from mpmd.compile.passes.fusion import KeepRounding
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.native_functions import Floats

pytestmark = pytest.mark.usefixtures("plain_xla")

floats = Floats()


def native(function, *arguments):
    fragment = fragment_of(function, *arguments)
    return run(fragment, list(arguments), compiled(fragment))


def scaled(x):
    y = x * jnp.asarray(1.3, x.dtype) + jnp.asarray(0.07, x.dtype)
    return y / jnp.abs(y).max(-1, keepdims=True)


def product(x):
    """Nothing in it cancels, which would round it anyway."""
    return jnp.tanh(x * jnp.asarray(1.3, x.dtype)) * x * jnp.asarray(0.07, x.dtype)


def in_a_loop(x):
    def step(carry, row):
        y = row * jnp.asarray(1.7, x.dtype) + carry
        return y - jnp.floor(y), jnp.round(y * 16).astype(jnp.int32)

    return jax.lax.scan(step, x[0], x)[1]


CASES = {
    "int8": lambda x: jnp.round(scaled(x) * 127.5).astype(jnp.int8),
    "int4": lambda x: jnp.clip(jnp.round(scaled(x) * 7), -8, 7).astype(jnp.int4).astype(jnp.int8),
    "truncated": lambda x: (scaled(x) * 100).astype(jnp.int32),
    "floor": lambda x: jnp.floor(scaled(x) * 40),
    "sign": lambda x: jnp.sign(scaled(x) * 3 - scaled(x) * 2 - scaled(x)),
    "remainder": lambda x: jax.lax.rem(scaled(x) * 40, jnp.asarray(3, x.dtype)),
    "comparison": lambda x: product(x)[:, :, None] > product(x)[:, None, :],
    "float8": lambda x: (scaled(x) * 30).astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "bits": lambda x: jax.lax.bitcast_convert_type(scaled(x) * 30, jnp.uint16),
    "argmax": lambda x: jnp.argmax(scaled(x) * x + 1, -1),
    "order": lambda x: jnp.argsort(product(x), -1, stable=True),
    "index": lambda x: jnp.arange(200)[(jnp.abs(scaled(x)) * 150).astype(jnp.int32)],
    "through f32": lambda x: jnp.round(scaled(x).astype(jnp.float32) * 127.5).astype(jnp.int8),
    "loop": in_a_loop,
}


def differing(function):
    """How many results differ from JAX without `jit`."""
    x = floats(32, 96, dtype=ml_dtypes.bfloat16)
    with jax.disable_jit():
        wanted = np.asarray(function(jnp.asarray(x)))
    return int((native(function, x)[0] != wanted).sum())


@pytest.mark.fast_cases("int8", "comparison", "argmax")
@pytest.mark.parametrize("name", CASES)
def test_what_is_discrete_is_that_of_jax_operation_by_operation(name):
    assert differing(CASES[name]) == 0


def test_without_the_pass_buckets_are_others(monkeypatch):
    monkeypatch.setattr(KeepRounding, "rewrite", lambda self, module: False)
    assert differing(CASES["int8"]) > 0


def test_the_maximum_of_a_fragment_is_found_in_another_one():
    x, b = floats(64, 128, dtype=ml_dtypes.bfloat16), floats(128, dtype=ml_dtypes.bfloat16)

    def value(x, b):
        return jnp.tanh(x * jnp.asarray(0.3, x.dtype)) * b + b

    (most,) = native(lambda x, b: value(x, b).max(-1, keepdims=True), x, b)
    (found,) = native(lambda x, b, m: (value(x, b) == m).any(-1), x, b, most)
    assert found.all()


def test_smooth_chains_stay_more_exact_than_their_type():
    x = floats(64, 128, dtype=ml_dtypes.bfloat16)

    def smooth(x):
        return jnp.tanh(x * jnp.asarray(1.3, x.dtype) + jnp.asarray(0.1, x.dtype)) * x + x

    exact = smooth(x.astype(np.float32))
    (found,) = native(smooth, x)
    with jax.disable_jit():
        rounded = np.asarray(smooth(jnp.asarray(x)))
    error, other = (np.abs(v.astype(np.float32) - exact).mean() for v in (found, rounded))
    assert error < 0.8 * other


def test_an_abrupt_operation_reads_what_is_stored():
    """Also in a plan that no pass has seen: the floor of a value and the value itself agree."""
    size = 64
    b = PlanBuilder("floors", (size,))
    x, inverse = (b.load_dense(b.operand(name, "bf16", size)) for name in ("x", "inverse"))
    y = b.apply("multiply", x, inverse)  # about one
    b.store_dense(b.operand("y", "bf16", size), y)
    b.store_dense(b.operand("z", "bf16", size), b.apply("floor", y))
    plan = without_rounding(b.finish())
    given = np.linspace(1, 2, size).astype(ml_dtypes.bfloat16)
    stored, floors = np.empty_like(given), np.empty_like(given)
    evaluate(plan, [given, (1 / given.astype(np.float32)).astype(given.dtype), stored, floors])
    np.testing.assert_array_equal(floors, np.floor(stored.astype(np.float32)))
