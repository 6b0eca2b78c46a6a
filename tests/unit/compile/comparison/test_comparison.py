"""What rounding explains, and fragments in f64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.comparison.narrowing import opinions_of, widened
from mpmd.compile.comparison.rounding import Rounding
from mpmd.compile.fragment import FragmentModule, ValueSpec
from tests.support.native_fragments import mlir_type
from tests.support.native_meshes import mesh_of

F32, BF16 = Rounding.of("tensor<4xf32>"), Rounding.of("tensor<4xf32>, tensor<bf16>")
A = np.array([1.0, -2.0, 3.0, 1e-3], np.float32)


def fragment_of(function, *arguments):
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)

    def specs(values):
        return tuple(ValueSpec(v.shape, mlir_type(v.dtype), ((),) * len(v.shape)) for v in values)

    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    return FragmentModule("f", "m", lowered.as_text(), specs(arguments), specs(results))


def opinions(function, inputs, got, expected):
    fragment = fragment_of(function, *inputs)
    return opinions_of(fragment, mesh_of({"x": 1}), [got], [expected], lambda: inputs)


def test_rounding_is_that_of_the_narrowest_floats():
    assert F32.unit == 2.0**-23 and BF16.unit == 2.0**-7
    assert Rounding.of("tensor<3xi32>").unit == 2.0**-52


@pytest.mark.parametrize(
    ("other", "explained"),
    [
        (A * np.float32(1 + 1e-6), True),
        (A + np.float32(1e-6), True),
        (A * np.float32(1 + 1e-3), False),
        (np.where(A == 3, np.nan, A), False),
        (np.where(A == 3, np.inf, A), False),
    ],
)
def test_differences_of_floats(other, explained):
    found = F32.difference(other.astype(np.float32), A)
    assert F32.explains(found) is explained
    assert F32.difference(A, A).ulps == 0


def test_the_element_that_differs_most_is_named():
    other = A.reshape(2, 2).copy()
    other[1, 0] = 4
    found = F32.difference(other, A.reshape(2, 2))
    assert (found.index, found.got, found.expected, found.count, found.size) == ((1, 0), 4.0, 3.0, 1, 4)
    assert "got 4.0, expected 3.0 at [1, 0]" in str(found)


def test_equal_values_that_are_not_finite_and_narrow_types():
    special = np.array([np.nan, np.inf, -np.inf, 0], np.float32)
    assert F32.difference(special, special.copy()).ulps == 0
    narrow = A.astype(ml_dtypes.bfloat16)
    assert BF16.explains(BF16.difference(narrow, (A * 1.01).astype(ml_dtypes.bfloat16)))
    assert not BF16.explains(BF16.difference(narrow, (A * 1.5).astype(ml_dtypes.bfloat16)))
    assert F32.difference(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)).size == 0
    assert not F32.explains(F32.difference(np.array([1, 2]), np.array([1, 3])))


def test_whose_error_is_larger_than_rounding():
    double = np.tanh(A)
    assert opinions(jnp.tanh, [A], double * np.float32(1.1), double).verdict(0) == "got"
    assert opinions(jnp.tanh, [A], double, double * np.float32(1.1)).verdict(0) == "expected"
    assert opinions(jnp.tanh, [A], double * np.float32(1.2), double * np.float32(0.9)).verdict(0) == ""
    assert opinions(jnp.tanh, [A], double * np.float32(1.1), double).wrong == [0]
    assert opinions(jnp.tanh, [A], double, double * np.float32(1.1)).less_exact == [0]


def test_a_fragment_in_f64_has_the_constants_and_bits_of_its_own_types():
    table = np.array([np.inf, 1.5, np.nan, -0.0], np.float32)

    def function(x, y):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        drawn = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
        blob = jnp.asarray(np.linspace(0, 1, 64, dtype=np.float32)).reshape(16, 4)
        return (
            drawn + table,
            blob.sum() * y,
            (y.astype(jnp.bfloat16) + jnp.bfloat16(np.inf)).astype(jnp.float32),
        )

    inputs = [A, np.float32(3)]
    fragment = fragment_of(function, *inputs)
    wanted = [np.asarray(v) for v in jax.jit(function)(*inputs)]
    exact = opinions_of(fragment, mesh_of({"x": 1}), wanted, wanted, lambda: inputs).exact
    for got, want in zip(exact, wanted, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_call_of_a_library_has_no_f64():
    fragment = fragment_of(jnp.linalg.cholesky, np.eye(3, dtype=np.float32))
    assert widened(fragment) is None
