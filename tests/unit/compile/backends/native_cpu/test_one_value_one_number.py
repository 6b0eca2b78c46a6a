"""A value that several passes, kernels or fragments compute is the same number in all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.llvm.cpu import named_target
from mpmd.compile.llvm.engine import emit_assembly
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import vector
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.native_functions import Floats

pytestmark = pytest.mark.optimized  # products and sums are joined by optimizations

floats = Floats()


def native(function, *arguments):
    fragment = fragment_of(function, *arguments)
    return run(fragment, list(arguments), compiled(fragment))


def scaled(x, b):
    """A product with another user, and a sum with it."""
    z = x * 0.3
    return z, z + b


def rows(x, b):
    z, y = scaled(x, b)
    return (y == y.max(-1, keepdims=True)).sum(-1), z


def columns(x, b):
    z, y = scaled(x, b)
    return (y == y.max(0)).sum(0), jnp.sin(z)


def gaps(x, b):
    z, y = scaled(x, b)
    return jnp.sqrt(y.max(-1, keepdims=True) - y), z


def gradient(x, b):
    def loss(x):
        z, y = scaled(x, b)
        return y.max(-1).sum() + y.min(-1).sum() + jnp.sin(z).sum()

    return jax.grad(loss)(x)


def normed_gradient(x):
    def loss(x):
        s = x * 8**-0.5
        y = (s - s.max(-1, keepdims=True)) ** 2
        return jnp.sin(y / (y.max(-1, keepdims=True) + 0.5)).sum()

    return jax.grad(loss)(x * 5)


@pytest.mark.parametrize("shape", [(8, 128), (40, 64), (9, 33)])
def test_every_row_and_column_has_its_maximum(shape):
    x, b = floats(*shape), floats(shape[1])
    assert (native(rows, x, b)[0] == 1).all()
    assert (native(columns, x, b)[0] == 1).all()


def test_nothing_is_larger_than_the_maximum():
    found = native(gaps, floats(64, 128), floats(128))[0]
    assert not np.isnan(found).any() and ((found == 0).sum(-1) == 1).all()


def test_the_gradient_of_extremes_and_of_what_is_divided_by_one():
    x, b = floats(64, 128), floats(128)
    y = (x * np.float32(0.3) + b).astype(np.float64)
    slope = np.cos(x * 0.3) + (y == y.max(-1, keepdims=True)) + (y == y.min(-1, keepdims=True))
    np.testing.assert_allclose(native(gradient, x, b)[0], 0.3 * slope, rtol=1e-5)
    assert np.isfinite(native(normed_gradient, x)[0]).all()


def test_a_value_recomputed_in_another_fragment():
    x, b = floats(64, 128), floats(128)
    (most,) = native(lambda x, b: scaled(x, b)[1].max(-1, keepdims=True), x, b)
    found, _ = native(lambda x, b, m: ((scaled(x, b)[1] == m).sum(-1), scaled(x, b)[0]), x, b, most)
    assert (found == 1).all()


@pytest.mark.parametrize("op", ["exponential", "tanh", "logistic", "log", "sine", "power"])
def test_a_value_of_a_row_is_that_of_its_elements(op):
    """One kernel computes it once per row, as a scalar, the other in every lane."""
    function = {
        "exponential": jnp.exp,
        "tanh": jnp.tanh,
        "logistic": jax.nn.sigmoid,
        "log": lambda v: jnp.log(abs(v)),
        "sine": jnp.sin,
        "power": lambda v: abs(v) ** 1.7,
    }[op]
    x, y = floats(700) * 3, floats(700, 24)
    (flat,) = native(function, x)
    (each,) = native(lambda x, y: function(x)[:, None] * y, x, y)
    np.testing.assert_array_equal(each, flat[:, None] * y)


def test_sums_and_products_are_those_of_ieee():
    x, y, z = floats(33, 65), floats(33, 65), floats(33, 65)
    np.testing.assert_array_equal(native(lambda x, y, z: x * y + z, x, y, z)[0], x * y + z)
    np.testing.assert_array_equal(native(lambda x, y, z: z - x * y, x, y, z)[0], z - x * y)


@pytest.mark.parametrize("name", ["avx2", "avx512", "neon"])
def test_no_target_joins_a_product_and_a_sum(name):
    module = Module(named_target(name))
    type_ = vector("float", module.target.lanes())
    with FunctionBuilder(module, "apply", [("x", "ptr"), ("y", "ptr")]) as f:
        x, y = f.load(f.arguments["x"], type_), f.load(f.arguments["y"], type_)
        f.store(f.add(f.mul(x, y), f.sub(y, f.mul(x, x))), f.arguments["y"])
    assembly = emit_assembly(module)
    assert "mul" in assembly and not any(word in assembly for word in ("vfm", "vfnm", "fmla", "fmls"))


def test_f16_is_rounded_after_each_operation():
    x, y = floats(33, 65, dtype=np.float16), floats(33, 65, dtype=np.float16)
    np.testing.assert_array_equal(native(lambda x, y: x * y + x - y * y, x, y)[0], x * y + x - y * y)
