"""Ranges of the results of a function are those of the whole results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from mpmd.tracing.wanted_ranges import DemandedJaxpr, Range


def initial(key, table):
    """Stacks of six rows, as they are created by hand and by libraries; `last` along its last dim."""
    keys = jax.random.split(key, 6)
    one_key = jax.random.normal(keys[0], (6, 3, 5))
    of_rows = jax.vmap(lambda k: jax.nn.initializers.lecun_normal()(k, (3, 5)))(keys)

    def layer(carry, k):
        w = jax.random.truncated_normal(k, -1, 1, (3, 4), jnp.bfloat16)
        return carry * 2 + 1, {"w": w, "depth": carry, "scale": jnp.ones(4)}

    _, scanned = jax.lax.scan(layer, jnp.float32(1), keys)
    _, backwards = jax.lax.scan(lambda c, k: (c * 3 + k, c - k), 0.5, jnp.arange(6.0), reverse=True)
    return {
        "one_key": one_key,
        "bits": jax.random.bits(keys[1], (6, 7), jnp.uint8),
        "of_rows": of_rows,
        "scanned": scanned,
        "backwards": backwards,
        "keys": keys,
        "zeros": jax.tree.map(jnp.zeros_like, scanned),
        "joined": jnp.concatenate([one_key, of_rows[:, :, :2]], -1),
        "stacked": jnp.concatenate([one_key[:2], of_rows[1:5]]),
        "steps": jnp.arange(6) * 2,
        "last": jnp.swapaxes(one_key, 0, 2).reshape(15, 6) + table.T[:1],
        "table": table[:6].reshape(6, 1, 2),
        "sums": jax.nn.relu(of_rows).sum(1),
        "sorted": jnp.sort(one_key, axis=0),
    }


def computed(inputs, demands):
    """The results of `initial` for some ranges, and what could not be divided."""
    closed = jax.make_jaxpr(initial)(*inputs)
    demanded = DemandedJaxpr(closed.jaxpr, [[d] for d in demands])

    def run(*values):
        given = [
            {d: v if d is None else v[d.start : d.stop] for d in of}
            for v, of in zip(values, demanded.inputs, strict=True)
        ]
        made = demanded.run([{None: value} for value in closed.consts], given)
        return [of_result[d] for of_result, d in zip(made, demands)]

    return jax.jit(run)(*inputs), demanded


# XLA reassociates products with constants, differently in different fusions: the last bits of floats.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize(("start", "stop"), [(1, 4), (0, 6), (5, 6), (0, 2)])
def test_a_range_of_every_result_is_that_of_the_whole(start, stop):
    inputs = jax.random.key(3), np.arange(12, dtype=np.float32).reshape(6, 2)
    whole = jax.jit(initial)(*inputs)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(whole)]
    demands = [Range(1 if path == "['last']" else 0, start, stop) for path in paths]
    found, demanded = computed(inputs, demands)
    for path, want, got, demand in zip(paths, jax.tree.leaves(whole), found, demands, strict=True):
        want = jax.lax.slice_in_dim(want, demand.start, demand.stop, axis=demand.dim)
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            want, got = jax.random.key_data(want), jax.random.key_data(got)
        assert want.dtype == got.dtype, path
        close = TOLERANCE.get(str(want.dtype), 0)
        np.testing.assert_allclose(np.float64(got), np.float64(want), close, close, err_msg=path)
    assert {note.primitive for note in demanded.whole} == {"sort"}


def bits_of(key_count, shape, dtype, demand):
    """Random bits as `DemandedJaxpr` computes them, and the whole of them as JAX does."""

    def bits(key):
        keys = jax.random.split(key, key_count)
        return (
            jax.vmap(lambda k: jax.random.bits(k, shape, dtype))(keys)
            if key_count > 1
            else (jax.random.bits(key, shape, dtype))
        )

    key = jax.random.key(5)
    demanded = DemandedJaxpr(jax.make_jaxpr(bits)(key).jaxpr, [[demand]])
    return demanded.run([], [{None: key}])[0][demand], bits(key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key_count", "shape", "dtype", "demand"),
    [
        (1, (5, 3), "uint32", None),
        (1, (), "uint32", None),
        (1, (7, 2, 3), "uint16", Range(0, 2, 5)),
        (4, (3, 2), "uint8", None),
        (4, (), "uint32", Range(0, 1, 3)),
        (4, (6, 2), "uint32", Range(0, 3, 4)),
        (4, (6, 2), "uint32", Range(1, 3, 5)),
        (1, (3, 4), "uint32", Range(1, 0, 2)),
    ],
)
def test_random_bits_are_those_of_jax(key_count, shape, dtype, demand):
    got, want = bits_of(key_count, shape, dtype, demand)
    if demand is not None:
        want = jax.lax.slice_in_dim(want, demand.start, demand.stop, axis=demand.dim)
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_the_position_of_random_bits_has_64_bits():
    rows, row = 1 << 21, 1 << 13
    closed = jax.make_jaxpr(lambda key: jax.random.bits(key, (rows, row)))(jax.random.key(5))
    demand = Range(0, rows - 1, rows)
    got = DemandedJaxpr(closed.jaxpr, [[demand]]).run([], [{None: jax.random.key(5)}])[0][demand]
    position = np.uint64(rows - 1) * np.uint64(row) + np.arange(row, dtype=np.uint64)
    halves = (position >> np.uint64(32)).astype(np.uint32), position.astype(np.uint32)
    first, second = threefry2x32_p.bind(*jax.random.key_data(jax.random.key(5)), *halves)
    np.testing.assert_array_equal(got[0], first ^ second)


@pytest.mark.optimized
def test_random_numbers_are_computed_without_temporaries():
    key = jax.random.key(5)
    closed = jax.make_jaxpr(lambda key: jax.random.bits(key, (64, 4096)) >> 8)(key)
    demanded = DemandedJaxpr(closed.jaxpr, [[None]])
    compiled = jax.jit(lambda key: demanded.run([], [{None: key}])[0][None]).lower(key).compile()
    np.testing.assert_array_equal(compiled(key), jax.random.bits(key, (64, 4096)) >> 8)
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 4096


def test_what_is_not_wanted_is_not_computed():
    table = np.ones((6, 2), np.float32)
    closed, shapes = jax.make_jaxpr(initial, return_shape=True)(jax.random.key(3), table)
    flat = jax.tree_util.tree_leaves_with_path(shapes)
    wanted = [[Range(0, 1, 3)] if "table" in jax.tree_util.keystr(path) else [] for path, _ in flat]
    demanded = DemandedJaxpr(closed.jaxpr, wanted)
    assert demanded.inputs == [[], [Range(0, 1, 3)]]
