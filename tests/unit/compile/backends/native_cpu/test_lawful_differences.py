"""Where native code differs from XLA:CPU and NumPy sides with it: docs/decisions/bit-identity.md."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.native_functions import Floats

floats = Floats()


def native(function, *arguments):
    fragment = fragment_of(function, *arguments)
    return run(fragment, list(arguments), compiled(fragment))


def test_division_is_that_of_ieee_and_ties_fall_as_it_says():
    s = np.linspace(0.1, 3, 40, dtype=np.float32)[:, None]
    x = (np.arange(-8, 7, dtype=np.float32) + np.float32(0.5)) * s
    by_array, by_constant, bucket = native(
        lambda x, s: (
            x / s,
            x / np.float32(0.7),
            jnp.clip(jnp.round(x / s), -8, 7).astype(jnp.int4).astype("int8"),
        ),
        x,
        s,
    )
    np.testing.assert_array_equal(by_array, x / s)
    np.testing.assert_array_equal(by_constant, x / np.float32(0.7))
    np.testing.assert_array_equal(bucket, np.clip(np.round(x / s), -8, 7))
    reciprocal = np.round(x * (np.float32(1) / s))
    assert (np.clip(reciprocal, -8, 7) != bucket).any(), "no tie distinguishes the two"


def test_bf16_sums_and_chains_are_nearer_to_the_exact_ones_than_rounding_each_operation():
    x, w = floats(64, 300, dtype=ml_dtypes.bfloat16), floats(300, dtype=ml_dtypes.bfloat16)

    def function(x, w):
        return (x * w + x * w * x).sum(-1)

    (found,) = native(function, x, w)
    exact = function(x.astype(np.float64), w.astype(np.float64))
    with jax.disable_jit():
        rounded = np.asarray(function(jnp.asarray(x), jnp.asarray(w)))
    errors = [np.abs(v.astype(np.float64) - exact).mean() for v in (found, rounded)]
    assert errors[0] < errors[1]


def test_approximate_maxima_are_the_largest_whatever_their_order_at_ties():
    x = np.random.default_rng(0).integers(0, 9, (8, 300)).astype(np.float32)
    most, places = native(lambda x: jax.lax.approx_max_k(x, 6), x)
    np.testing.assert_array_equal(most, -np.sort(-x, -1)[:, :6])
    np.testing.assert_array_equal(np.take_along_axis(x, places, -1), most)
    assert all(len(set(row)) == row.size for row in places)


def test_slices_of_slices_are_moved_inside_of_each_array():
    """A slice at a place beyond the end is clamped twice, once in each array; merged, it would be once."""
    x = np.arange(10, dtype=np.float32)
    for i, j in ((8, 4), (0, 9), (9, 9), (-3, 2)):
        (found,) = native(
            lambda x, i, j: jax.lax.dynamic_slice(jax.lax.dynamic_slice(x, (i,), (5,)), (j,), (2,)),
            x,
            np.int32(i),
            np.int32(j),
        )
        low = min(max(i + 10 * (i < 0), 0), 5)  # JAX counts negative places from the end
        inner = min(max(j, 0), 3)
        np.testing.assert_array_equal(found, x[low : low + 5][inner : inner + 2])


def test_a_scatter_reads_its_operand_as_it_was():
    x, places = np.arange(6, dtype=np.float32), np.array([0, 2, 2, 5], np.int32)
    (found,) = native(lambda x, n: x.at[n].add(x[::-1][:4]) + x, x, places)
    want = x.copy()
    np.add.at(want, places, x[::-1][:4])
    np.testing.assert_array_equal(found, want + x)


def test_nan_is_nan_whatever_its_bits():
    x = np.array([np.nan, -np.nan, np.inf, -1.0], np.float32)
    sums, roots = native(lambda x: (x - x, jnp.sqrt(x)), x)
    assert np.isnan(sums[:3]).all() and sums[3] == 0
    assert np.isnan(roots[[0, 1, 3]]).all() and np.isposinf(roots[2])


def test_a_gradient_that_is_zero_is_exactly_zero():
    x = floats(8, 33)
    (found,) = native(jax.grad(lambda x: (x - x).sum() + jnp.where(x > 9, x * x, 1.0).sum()), x)
    np.testing.assert_array_equal(found, 0)


def test_a_reduction_adds_its_start_once():
    """Also one that is not neutral, however many threads and lanes have parts of the sum."""
    x = np.arange(300 * 70, dtype=np.float32).reshape(300, 70) % 7
    reduce = jax.lax.reduce
    along, across, whole = native(
        lambda x: (
            reduce(x, np.float32(5), jax.lax.add, (1,)),
            reduce(x, np.float32(5), jax.lax.add, (0,)),
            reduce(x, np.float32(5), jax.lax.add, (0, 1)),
        ),
        x,
    )
    np.testing.assert_array_equal(along, x.sum(1) + 5)
    np.testing.assert_array_equal(across, x.sum(0) + 5)
    assert whole == x.sum(dtype=np.float64) + 5


def test_products_of_infinite_complex_numbers_are_their_definition():
    a = np.array([np.inf + 1j, 1 + 1j, np.nan], np.complex64)
    b = np.array([1 + 0j, np.inf + 0j, 1 + 0j], np.complex64)
    (found,) = native(lambda a, b: a * b, a, b)
    with np.errstate(all="ignore"):
        real, imaginary = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    np.testing.assert_array_equal(found.real, real)
    np.testing.assert_array_equal(found.imag, imaginary)
