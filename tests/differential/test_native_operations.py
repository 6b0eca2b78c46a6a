"""Functions of jax.numpy and jax.lax as native code, without XLA, against jax.jit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import native_fragments

pytestmark = pytest.mark.usefixtures("plain_xla")

RNG = np.random.default_rng(7)
ROWS = RNG.standard_normal((6, 37)).astype(np.float32)
LONG = RNG.standard_normal(10_007).astype(np.float32)
COUNTS = RNG.integers(-5, 6, (6, 37)).astype(np.int32)
HOLES = np.where(RNG.random((6, 37)) < 0.1, np.nan, ROWS).astype(np.float32)
FLAT = np.full((3, 20), -np.inf, np.float32)
PICTURE = RNG.standard_normal((2, 9, 10, 3)).astype(np.float32)


def windows(x: Any, init: float, by: Any, size: int, stride: int, holes: int) -> Any:
    """Windows over both dims of pictures."""
    dims, strides, dilation = (1, size, size, 1), (1, stride, stride, 1), (1, holes, holes, 1)
    return lax.reduce_window(x, init, by, dims, strides, "SAME", window_dilation=dilation)


REDUCTIONS = {
    "argmax of rows": (lambda x: jnp.argmax(x, axis=1), ROWS),
    "argmax of columns": (lambda x: jnp.argmax(x, axis=0), ROWS),
    "argmax of all": (jnp.argmax, ROWS),
    "argmax of a long row": (jnp.argmax, LONG),
    "argmax of integers with ties": (lambda x: jnp.argmax(x, axis=1), COUNTS),
    "argmax with NaN": (lambda x: jnp.argmax(x, axis=1), HOLES),
    "argmin with NaN": (lambda x: jnp.argmin(x, axis=1), HOLES),
    "nanargmin": (lambda x: jnp.nanargmin(x, axis=1), HOLES),
    "argmax of infinities": (lambda x: jnp.argmax(x, axis=1), FLAT),
    "argmin of truths": (lambda x: jnp.argmin(x > 0, axis=1), ROWS),
    "argmax of bf16": (lambda x: jnp.argmax(x.astype(jnp.bfloat16), axis=1), ROWS),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, axis=1), ROWS),
    "cumlogsumexp backwards": (lambda x: lax.cumlogsumexp(x, axis=0, reverse=True), ROWS),
    "cumsum of a long row": (jnp.cumsum, LONG),
    "cumprod": (lambda x: jnp.cumprod(x, axis=1), ROWS),
    "cummax": (lambda x: lax.cummax(x, axis=1), HOLES),
    "gradient of cumlogsumexp": (jax.grad(lambda x: jnp.sum(lax.cumlogsumexp(x, axis=1) ** 2)), ROWS),
    "exclusive or": (lambda x: lax.reduce(x, np.int32(0), lax.bitwise_xor, (1,)), COUNTS),
    "any and all": (lambda x: (jnp.any(x > 1, axis=1), jnp.all(x > -2, axis=0)), ROWS),
    "mean and variance at once": (
        lambda x: lax.reduce(
            (x, x * x), (np.float32(0), np.float32(0)), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,)
        ),
        ROWS,
    ),
    "a linear recurrence": (
        lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x), axis=1),
        ROWS,
    ),
    "maxima of windows with holes": (lambda x: windows(x, -np.inf, lax.max, 3, 1, 2), PICTURE),
    "gradient of sums of windows with holes": (
        jax.grad(lambda x: jnp.sum(windows(x, 0.0, lax.add, 3, 2, 2) ** 2)),
        PICTURE,
    ),
    "tangent of maxima of windows": (
        lambda x: jax.jvp(lambda y: windows(y, -np.inf, lax.max, 2, 2, 1), (x,), (x,)),
        PICTURE,
    ),
    "categorical": (lambda x: jax.random.categorical(jax.random.key(3), x), ROWS),
}

DEALT = RNG.integers(-3, 4, (4, 700)).astype(np.int32)
MIXED = RNG.standard_normal((4, 700)).astype(np.float32)
MIXED[0, :6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40]

CHANGES = {
    "adding a part of itself": (lambda x: x.at[:, jnp.array([3, 0, 3])].add(x[:, 4:7]), ROWS),
    "moving itself": (lambda x: x.at[1:4].set(x[2:5]), ROWS),
}

SORTS = {
    "rows": (jnp.sort, MIXED),
    "rows, falling": (lambda x: jnp.sort(x, descending=True), MIXED),
    "columns": (lambda x: jnp.sort(x, axis=0), MIXED.T.copy()),
    "a long row": (jnp.sort, LONG),
    "argsort with ties": (jnp.argsort, DEALT),
    "argsort of a long row": (jnp.argsort, LONG),
    "two keys": (lambda a, b: lax.sort((a, b), num_keys=2), DEALT, MIXED),
    "lexsort": (lambda a, b: jnp.lexsort((a, b), axis=-1), MIXED, DEALT),
    "largest of a long row": (lambda x: lax.top_k(x, 7), LONG),
    "about the largest": (lambda x: lax.approx_max_k(x, 7), LONG),
    "about the smallest": (lambda x: lax.approx_min_k(x, 7), MIXED[1:]),
    "median": (jnp.median, LONG),
    "quantiles": (lambda x: jnp.quantile(x, np.float32(0.3), axis=1), MIXED[1:]),
    "gradient": (jax.grad(lambda x: jnp.sum(jnp.sort(x)[500:] ** 2)), LONG),
    "permutation": (lambda x: jax.random.permutation(jax.random.key(1), x), LONG),
    "unique": (lambda x: jnp.unique(x, size=9, fill_value=99), DEALT),
}

Z = (RNG.standard_normal((5, 18)) + 1j * RNG.standard_normal((5, 18))).astype(np.complex64)
W = (RNG.standard_normal((5, 18)) + 1j * RNG.standard_normal((5, 18))).astype(np.complex64)
PLACES = np.array([3, 0, 3, 17], np.int32)

DIVIDED = np.array([[1, 1j, np.inf, 2, 1 - 1j, np.nan], [1, 0, 2, np.inf, 1j, 0]], np.complex64)
DIVIDING = np.array(
    [[0, 1j, 1, complex(np.inf, 0), 0, 1], [complex(0, -np.inf), 2, 3e20, 1e-30, 0, 1]], np.complex64
)
HUGE = np.array(
    [[89 + 1j, 89.5 - 2j, -100 + 1j, 1e30j, -3e38 - 3e38j, 20 + 1j, 3, -np.inf, 0, np.inf]], np.complex64
)
ENDLESS = np.array(
    [[complex(np.inf, np.inf), complex(np.nan, 0), complex(0, np.inf), 20 + 1j, 9j, -44]], np.complex64
)

COMPLEX = {
    "division by zero and infinity": (lambda z, w: z / w, DIVIDED, DIVIDING),
    "functions of huge numbers": (
        lambda z: (jnp.exp(z), jnp.log(z), jnp.sqrt(z), lax.rsqrt(z), lax.logistic(z)),
        HUGE,
    ),
    "tangents of infinities": (lambda z: (jnp.tanh(z), jnp.tan(z * 1j)), ENDLESS),
    "arithmetic": (lambda z, w: (z + 2 * w, z - 1j, z * w, z / w, -z), Z, W),
    "parts": (lambda z: (z.real, z.imag, jnp.conj(z), jnp.abs(z), jnp.angle(z), jnp.sign(z)), Z),
    **{
        name: (getattr(jnp, name), Z)
        for name in ("exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh")
    },
    "rsqrt": (lax.rsqrt, Z),
    "powers": (lambda z, w: (z**w, z**2, z**0.5), Z, W),
    "equality": (lambda z, w: (z == w, z != w, z == z), Z, W),
    "products": (lambda z, w: (z @ w.T, jnp.einsum("ij,ij->i", z, w.conj())), Z, W),
    "sums and means": (lambda z: (z.sum(1), z.mean(), jnp.var(z, axis=0)), Z),
    "products of all": (lambda z: (jnp.prod(z, axis=1), jnp.cumprod(z, axis=1)), Z),
    "running sums": (lambda z: jnp.cumsum(z, axis=1), Z),
    "sorting": (lambda z: (jnp.sort(z, axis=1), jnp.argsort(z.real + 0j, axis=1), jnp.max(z)), Z),
    "rearranging": (lambda z: (z.T[::-1], jnp.pad(z, 1), jnp.concatenate([z, z + 1]), jnp.roll(z, 2)), Z),
    "a loop": (lambda z: lax.fori_loop(0, 5, lambda i, x: x * z + 1, z), Z),
    "a scan": (lambda z: lax.scan(lambda a, b: (a * b, a + b), z[0], z), Z),
    "a condition": (lambda z: lax.cond(z[0, 0].real > 0, lambda x: x * 2, lambda x: x + 1j, z), Z),
    "gathering and scattering": (
        lambda z, k: (z[:, k], z.at[:, k].add(z[:, :4]), z.at[0, k].set(1j)),
        Z,
        PLACES,
    ),
    "rotary embedding": (
        lambda x: (lax.complex(x[:, :18], x[:, 18:36]) * jnp.exp(1j * x[:, :18])).real,
        ROWS,
    ),
    "gradients": (jax.grad(lambda x: jnp.sum(jnp.abs(jnp.exp(1j * x) * (x + 2j)) ** 2)), ROWS),
    "nothing": (lambda z: (z[:0] * 2, z), Z),
    "constants": (lambda x: (jnp.asarray([1j, 2.0]), x * 1j), ROWS),
}


def check(
    function: Any, *arguments: Any, rtol: float = 2e-5, atol: float = 2e-5, passes: tuple[str, ...] = ()
) -> None:
    """The results of native code are those of XLA."""
    fragment = native_fragments.fragment_of(function, *arguments)
    got = native_fragments.run(fragment, list(arguments), native_fragments.compiled(fragment, passes=passes))
    wanted = jax.tree.leaves(jax.jit(function)(*arguments))
    assert len(got) == len(wanted)
    for a, b in zip(got, map(np.asarray, wanted)):
        assert a.dtype == b.dtype
        if b.dtype.kind in "biu":
            np.testing.assert_array_equal(a, b)
        else:
            for x, y in ((a.real, b.real), (a.imag, b.imag)):  # beside an infinite part the other one counts
                np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


@pytest.mark.fast_cases(13)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    check(*REDUCTIONS[name])


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place(name: str) -> None:
    check(*CHANGES[name])


@pytest.mark.parametrize("name", SORTS)
def test_sorts(name: str) -> None:
    check(*SORTS[name])


@pytest.mark.fast_cases(17)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers(name: str) -> None:
    check(*COMPLEX[name])
