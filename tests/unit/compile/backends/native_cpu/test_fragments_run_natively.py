"""Functions through the native pipeline: the numbers of jax.jit and the evaluator, from poisoned memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.lowering import lower
from mpmd.compile.thunks.thunk import CopyThunk
from tests.support.hlo_meaning import evaluate
from tests.support.native_fragments import check_memory, compiled, fragment_of, run
from tests.support.native_functions import Floats, attention, gradients, layer_norm

pytestmark = pytest.mark.usefixtures("plain_xla")

floats = Floats()


def ints(count):
    return np.arange(count, dtype=np.int32)


def ties():
    return np.round(floats(4, 9) * 2)


def rotate(state):
    return jax.lax.fori_loop(
        0, 5, lambda i, c: (c[1], c[2] + 1, c[0], c[3].at[i].set(c[0].sum())), (*state, jnp.zeros(5))
    )


def nested(x):
    def outer(carry, row):
        inner = jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c + row), carry)
        return inner, inner * row

    return jax.lax.scan(outer, x[0], x)


CASES = {
    "elementwise": (lambda x, y: jnp.tanh(x * y) + jnp.where(x > 0, x, -y), floats(5, 7), floats(5, 7)),
    "product": (lambda x, w, b: jax.nn.gelu(x @ w + b), floats(9, 5), floats(5, 17), floats(17)),
    "product of transposed": (lambda x, w: (x.T @ w, w.T @ x), floats(6, 5), floats(6, 8)),
    "integer product": (lambda x, w: x @ w, ints(12).reshape(3, 4), ints(8).reshape(4, 2)),
    "batched product": (lambda x, w: jnp.einsum("bij,bkj->bik", x, w), floats(3, 4, 5), floats(3, 6, 5)),
    "softmax": (jax.nn.softmax, floats(6, 33)),
    "log softmax": (jax.nn.log_softmax, floats(6, 33)),
    "layer norm": (layer_norm, floats(2, 6, 20), floats(20), floats(20)),
    "layer norm gradients": (gradients(layer_norm), floats(2, 6, 20), floats(20), floats(20)),
    "attention": (attention, floats(2, 6, 8), floats(8, 24), floats(8, 8)),
    "attention gradients": (gradients(attention), floats(2, 6, 8), floats(8, 24), floats(8, 8)),
    "sums": (lambda x: (x.sum(), x.sum(0), x.sum((0, 2)), x.max(1), x.min(-1), x.prod()), floats(3, 4, 5)),
    "sum of many": (lambda x: (x.sum(), jnp.sqrt((x * x).sum())), floats(70, 300)),
    "integer sums": (lambda x: (x.sum(), x.max(), (x > 1).any(), (x > 1).all(0)), ints(24).reshape(4, 6)),
    "movement": (
        lambda x: (x.T.reshape(-1), x[::-1, 1:5:2], jnp.pad(x, ((1, 2), (0, 3))), jnp.flip(x, 1)),
        floats(4, 6),
    ),
    "padding inside": (lambda x: jax.lax.pad(x, 1.5, ((-1, 2, 1), (2, -1, 2))), floats(4, 5)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y * 2, x[:1]]), floats(3, 4), floats(2, 4)),
    "embedding": (gradients(lambda e: e[np.array([[1, 4], [0, 1]])]), floats(5, 8)),
    "gather out of range": (
        lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
        floats(4, 3),
        np.int32([-9, 2, 9]),
    ),
    "scatter": (
        lambda x, i: (x.at[i].add(2.0), x.at[i].set(3.0, mode="drop")),
        floats(4, 3),
        np.int32([1, 9, 1]),
    ),
    "dynamic slices": (
        lambda x, i: (
            jax.lax.dynamic_slice(x, (i, 0), (2, 3)),
            jax.lax.dynamic_update_slice(x, x[:2, :2] + 1, (i, 2)),
        ),
        floats(6, 4),
        np.int32(9),
    ),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), floats(3, 9)),
    "windows": (
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 3), (1, 2), ((1, 0), (0, 1))),
        floats(5, 8),
    ),
    "iota and bits": (
        lambda x: (x ^ (x >> 3), jax.lax.population_count(x), x << jnp.uint32(40), jnp.arange(7.0)),
        np.arange(9, dtype=np.uint32) * 77,
    ),
    "conversions": (
        lambda x: (
            x.astype(np.int32),
            x.astype(jnp.bfloat16),
            x.astype(np.float16),
            x > 0,
            x.astype(np.uint8),
        ),
        floats(40) * 100,
    ),
    "halves": (
        lambda x, w: (x @ w, jax.nn.softmax(x), x.sum(0), jnp.tanh(x)),
        floats(6, 32, dtype=jnp.bfloat16),
        floats(32, 16, dtype=jnp.bfloat16),
    ),
    "special numbers": (
        lambda x: (x + 1, jnp.exp(x), jnp.maximum(x, 0), jnp.isfinite(x), x.max(), jnp.sign(x)),
        np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -3.0], np.float32),
    ),
    "empty": (lambda x: (x + 1, x.sum(0), jnp.concatenate([x, x]), x.T), np.zeros((0, 3), np.float32)),
    "ones": (lambda x: (x.sum(0), x * 2, x.reshape(()), x @ x), floats(1, 1)),
    "loop that rotates": (rotate, (floats(4), floats(4), floats(4))),
    "loop until": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 2, jnp.abs(x) + 1),
        floats(3),
    ),
    "nested loops": (nested, floats(4, 6)),
    "scan gradients": (
        gradients(lambda x: jax.lax.scan(lambda c, r: (jnp.sin(c) * r, c), x[0], x)[0]),
        floats(4, 6),
    ),
    "branches": (
        lambda i, x: jax.lax.switch(i, [lambda x: x, lambda x: x.T * 2, lambda x: x * 0 + 1], x),
        np.int32(1),
        floats(4, 4),
    ),
    "condition": (lambda x: jax.lax.cond(x.mean() > 0, lambda x: x * 2, lambda x: x, x), floats(9)),
    "dropout": (
        lambda k, x: x * jax.random.bernoulli(jax.random.wrap_key_data(k), 0.8, x.shape),
        np.array([3, 4], np.uint32),
        floats(5, 9),
    ),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(-x, 0), jax.lax.top_k(x, 3)), ties()),
    "same result twice": (lambda x: (x, x, x + 1, jnp.float32(3)), floats(3)),
    "swap": (lambda x, y: (y, x), floats(3), floats(3)),
}


def close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(1.0, _size(want)))


def _size(values):
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0


@pytest.mark.fast_cases(20)
@pytest.mark.parametrize("name", CASES)
def test_equals_jit_and_the_evaluator(name):
    function, *arguments = CASES[name]
    leaves = jax.tree.leaves(arguments)
    fragment = fragment_of(function, *arguments)
    made = compiled(fragment, poison=True)
    check_memory(made)
    got = run(fragment, leaves, made)
    want = jax.tree.leaves(jax.jit(function)(*arguments))
    meant = jax.tree.leaves(evaluate(lower(fragment.text), leaves))
    assert len(got) == len(want) == len(meant)
    for mine, theirs, meaning in zip(got, want, meant):
        half = mine.dtype in (jnp.bfloat16, np.float16)
        close(mine, theirs, 3e-2 if half else 2e-5)
        close(mine, meaning, 3e-2 if half else 2e-5)


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(3)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "name", ["attention gradients", "loop that rotates", "sum of many", "branches", "scatter"]
)
def test_several_threads_give_the_same_bits(name, pool):
    function, *arguments = CASES[name]
    fragment, leaves = fragment_of(function, *arguments), jax.tree.leaves(arguments)
    made = compiled(fragment)
    alone = run(fragment, leaves, made)
    for _ in range(3):
        for one, other in zip(alone, run(fragment, leaves, made, pool)):
            np.testing.assert_array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def test_donated_arguments_are_updated_in_place():
    def step(p, m, g):
        m = 0.9 * m + g
        return p - 0.1 * m, m

    arguments = [floats(8, 16), floats(8, 16), floats(8, 16)]
    fragment = fragment_of(step, *arguments, donated=(0, 1))
    made = compiled(fragment)
    want = jax.jit(step)(*arguments)
    for mine, theirs in zip(run(fragment, arguments, made), want):
        close(mine, theirs, 1e-6)
    assert len(made.thunks) == 1, "one kernel, and no copies"
    assert made.assignment.arena_bytes == 0


def test_results_take_the_memory_of_what_they_are_computed_from():
    """JAX would pair them in order: here every result would then be copied at the end."""

    def step(a, b, c, d):
        return c * 2 + a, d * 3 + b, jnp.sin(a), jnp.cos(b)

    arguments = [floats(8, 16) for _ in range(4)]
    fragment = fragment_of(step, *arguments, donated=(0, 1, 2, 3))
    made = compiled(fragment)
    for mine, theirs in zip(run(fragment, arguments, made), jax.jit(step)(*arguments)):
        close(mine, theirs, 1e-6)
    assert not [t for t in made.thunks if isinstance(t, CopyThunk)]


def test_a_product_is_added_to_an_accumulator_in_place():
    def accumulate(total, x, w):
        return total + x @ w

    arguments = [floats(33, 40), floats(33, 700), floats(700, 40)]
    fragment = fragment_of(accumulate, *arguments, donated=(0,))
    made = compiled(fragment)
    close(run(fragment, arguments, made)[0], arguments[0] + arguments[1] @ arguments[2], 1e-4)
    assert len(made.thunks) == 1
    assert made.assignment.arena_bytes == 0


def test_donated_arguments_that_change_places():
    arguments = [floats(8), floats(8)]
    fragment = fragment_of(lambda x, y: (y + 1, x * y), *arguments, donated=(0, 1))
    got = run(fragment, arguments, compiled(fragment))
    close(got[0], arguments[1] + 1, 1e-6)
    close(got[1], arguments[0] * arguments[1], 1e-6)
