"""`Stacked` behaves as the whole array wherever users take it."""

import operator
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.tracing.stages.stacked.stacked import in_parts

WHOLE = np.arange(1.0, 25.0, dtype=np.float32).reshape(4, 2, 3)


@pytest.fixture
def stack() -> mpmd.Stacked:
    """Three rows on one device, one on another."""
    devices = jax.devices()[:2]
    assert len(devices) == 2
    parts = in_parts(WHOLE, (3, 1)).parts
    return mpmd.Stacked([jax.device_put(part, to) for part, to in zip(parts, devices)])


def devices_of(stack: mpmd.Stacked) -> list[set[jax.Device]]:
    return [part.devices() for part in stack.parts]


ELEMENTWISE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operators_compute_each_part_on_its_mesh(stack, name):
    op = getattr(operator, name)
    results = {
        "number": (op(stack, 3), op(WHOLE, np.float32(3))),
        "reflected": (op(3, stack), op(np.float32(3), WHOLE)),
        "stack": (op(stack, stack + 1), op(WHOLE, WHOLE + 1)),
    }
    for result, expected in results.values():
        assert isinstance(result, mpmd.Stacked) and devices_of(result) == devices_of(stack)
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-6)


def test_other_operands_meet_the_whole_array(stack):
    other = np.full((4, 2, 3), 2, np.float32)
    halves = in_parts(WHOLE, (2, 2))
    for result, expected in (
        (stack * other, WHOLE * 2),
        (other * stack, WHOLE * 2),
        (jnp.asarray(other) - stack, 2 - WHOLE),
        (stack + halves, WHOLE + WHOLE),
        (stack @ np.ones((3, 5), np.float32), WHOLE @ np.ones((3, 5), np.float32)),
        (np.ones((5, 2), np.float32) @ stack, np.ones((5, 2), np.float32) @ WHOLE),
    ):
        assert isinstance(result, jax.Array)
        np.testing.assert_array_equal(result, expected)


def test_it_has_what_an_array_has(stack):
    assert (stack.shape, stack.ndim, stack.size, len(stack)) == ((4, 2, 3), 3, 24, 4)
    assert stack.dtype == np.float32 and stack.nbytes == 96
    np.testing.assert_array_equal(-stack, -WHOLE)
    np.testing.assert_array_equal(abs(-stack), WHOLE)
    assert stack.astype(jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(stack.reshape(-1), WHOLE.reshape(-1))
    np.testing.assert_array_equal(jnp.asarray(stack), WHOLE)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(stack)), WHOLE)


def test_a_row_stays_where_it_is(stack):
    for row in (0, 2, 3, -1, -4):
        np.testing.assert_array_equal(stack[row], WHOLE[row])
    assert stack[3].devices() == devices_of(stack)[1] == stack[-1].devices()
    np.testing.assert_array_equal(np.stack(list(stack)), WHOLE)
    for row in (4, -5):
        with pytest.raises(IndexError, match=rf"row {row} of Stacked\(float32\[4,2,3\] in 2 parts"):
            stack[row]
    np.testing.assert_array_equal(stack[1:, 0], WHOLE[1:, 0])
    np.testing.assert_array_equal(stack[jnp.array([3, 0])], WHOLE[[3, 0]])


def test_fetched_it_is_an_array_as_of_jit(stack):
    fetched = mpmd.fetch({"layers": stack, "n": 3}, jax.devices()[1])
    assert fetched["n"] == 3 and fetched["layers"].devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(jax.jit(lambda tree: tree["layers"][1] * 2)(fetched), WHOLE[1] * 2)


def test_fetched_numpy_stays_numpy_and_shapes_stay_shapes():
    fetched = mpmd.fetch(in_parts(WHOLE, (3, 1)))
    assert isinstance(fetched, np.ndarray)
    np.testing.assert_array_equal(fetched, WHOLE)
    shape = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    assert mpmd.fetch(in_parts(shape, (3, 1))) == shape


def test_inside_of_jit_it_is_the_whole_array():
    stack = in_parts(WHOLE, (2, 2))
    np.testing.assert_array_equal(jax.jit(lambda s: s @ jnp.ones((3, 1)))(stack), WHOLE @ np.ones((3, 1)))


BODIES = {
    "operand": lambda x, w: x + w @ x,
    "number": lambda x, w: x + jnp.sum((w * 2)[0]),
    "index": lambda x, w: x + w[0],
    "slice": lambda x, w: x + w[:1].sum(),
    "stack": lambda x, w: x + jnp.sum((w + w).parts[0]),
    "negative": lambda x, w: x + jnp.sum((-w).parts[0]),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_scan_over_its_parts_is_refused(body):
    """Each iteration would see as many rows as there are parts, and half of the iterations would not run."""
    stack = in_parts(WHOLE, (2, 2))
    with pytest.raises(TypeError, match=r"is not an array: a scan or a vmap went into its parts"):
        jax.lax.scan(lambda x, w: (body(x, w), None), jnp.ones(3), stack)


def test_stacks_along_other_dims_are_not_added_part_by_part():
    square = np.arange(4.0).reshape(2, 2)
    total = in_parts(square, (1, 1), 0) + in_parts(square, (1, 1), 1)
    assert isinstance(total, jax.Array)
    np.testing.assert_array_equal(total, 2 * square)


def test_flax_writes_whole_arrays_and_restores_parts(stack):
    state = {"layers": stack, "head": np.ones(2, np.float32)}
    data = flax.serialization.to_bytes(state)
    assert data == flax.serialization.to_bytes({"layers": WHOLE, "head": np.ones(2, np.float32)})
    restored = flax.serialization.from_bytes({**state, "layers": stack * 0}, data)["layers"]
    assert devices_of(restored) == devices_of(stack)
    np.testing.assert_array_equal(restored, WHOLE)
