"""Native executables called with arrays: which they take, and in which order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import mpmd
from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.jax_compat import make_cpu_client
from tests.support.native_fragments import fragment_of


def arrays(*shapes, device=None):
    rng = np.random.default_rng(0)
    return [jax.device_put(rng.standard_normal(s).astype(np.float32), device) for s in shapes]


def loaded(function, *arguments, donated=()):
    fragment = fragment_of(function, *arguments, donated=donated)
    return NativeCpuBackend().compile(fragment, Mesh(np.array(jax.devices()[:1]), ("d",)))


def scaled(x, y):
    return x * 2 + y


def of_another_client(x):
    return jax.device_put(np.asarray(x), make_cpu_client(1).devices()[0])


def on_two_devices(x):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def deleted(x):
    copy = x + 0
    copy.delete()
    return copy


UNFIT = {
    "another shape of as many elements": lambda x: x.T,
    "another shape": lambda x: x[:2],
    "another element type of as many bytes": lambda x: x.view(jnp.int32),
    "another device": lambda x: jax.device_put(x, jax.devices()[1]),
    "another client": of_another_client,
    "several devices": on_two_devices,
    "deleted": deleted,
}


@pytest.mark.parametrize("before", ["first call", "after calls that fit"])
@pytest.mark.parametrize("name", sorted(UNFIT))
def test_an_array_that_does_not_fit_is_refused_and_nothing_else_is_lost(name, before):
    x, y = arrays((3, 4), (3, 4))
    executable = loaded(scaled, x, y)
    if before != "first call":
        for _ in range(3):
            executable(x, y)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        executable(x, UNFIT[name](y))
    (result,) = executable(x, y)
    np.testing.assert_array_equal(result, scaled(x, y))


def test_a_call_takes_as_many_arrays_as_the_fragment_has_arguments():
    x, y = arrays((3, 4), (3, 4))
    executable = loaded(scaled, x, y)
    executable(x, y)
    for wrong in ((x,), (x, y, x), ()):
        with pytest.raises(TypeError):
            executable(*wrong)


def test_a_fragment_may_take_nothing():
    executable = loaded(lambda: jnp.arange(4.0) * 3)
    for _ in range(3):
        np.testing.assert_array_equal(executable()[0], [0, 3, 6, 9])


def test_what_is_no_array_of_jax_is_taken_as_jax_takes_it():
    x, y = arrays((3, 4), (3, 4))
    executable = loaded(scaled, x, y)
    for given in ((x, y), (np.asarray(x), y), (x, np.asarray(y))):
        np.testing.assert_array_equal(executable(*given)[0], scaled(x, y))
    with pytest.raises(TypeError, match="transformations"):
        jax.jit(lambda *a: executable(*a))(x, y)


def test_results_are_what_jax_says_that_they_are():
    x, y = arrays((3, 4), (3, 4))
    executable = loaded(scaled, x, y)
    for made in [executable(x, y) for _ in range(3)]:
        assert len(made) == 1
        assert (made[0].aval, made[0].sharding, made[0].committed) == (
            (expected := executable.compiled(x, y)[0]).aval,
            expected.sharding,
            expected.committed,
        )
    again = executable(executable(x, y)[0], executable(y, x)[0])  # and they fit as arguments
    np.testing.assert_array_equal(again[0], scaled(scaled(x, y), scaled(y, x)))


def test_arrays_with_equal_content_and_different_types_may_alternate():
    x, y = arrays((3, 4), (3, 4))
    executable = loaded(scaled, x, y)
    (wanted,) = executable(x, y)
    mesh = Mesh(np.array(jax.devices()[:1]), ("other",))
    named = jax.device_put(y, NamedSharding(mesh, PartitionSpec("other")))
    plain = jax.device_put(y, SingleDeviceSharding(jax.devices()[0]))
    for given in (named, plain, named, y, plain):
        np.testing.assert_array_equal(executable(x, given)[0], wanted)


def test_threads_may_call_with_different_types_at_the_same_time():
    x, y = arrays((3, 4), (3, 4))
    executable = loaded(scaled, x, y)
    mesh = Mesh(np.array(jax.devices()[:1]), ("other",))
    named = jax.device_put(y + 1, NamedSharding(mesh, PartitionSpec("other")))
    wanted = {id(v): np.asarray(scaled(x, v)) for v in (y, named)}

    def calls(value):
        return all(np.array_equal(executable(x, value)[0], wanted[id(value)]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, [y, named, y, named]))


def update(step, w, g, m):
    """Four results; JAX and we may pair donated arguments with them in another order."""
    moved = 0.9 * m + g
    return step + 1, moved.sum(), w - moved, moved


@pytest.mark.parametrize("donated", [(), (3,), (1, 3), (3, 1, 0)])
def test_donated_arguments_and_results_keep_the_fragments_order(donated):
    step, w, g, m = jnp.float32(1), *arrays((4, 8), (4, 8), (4, 8))
    wanted = [np.asarray(r) for r in jax.jit(update)(step, w, g, m)]
    executable = loaded(update, step, w, g, m, donated=donated)
    for _ in range(2):
        given = [a + 0 for a in (step, w, g, m)]
        made = executable(*given)
        for got, expected in zip(made, wanted, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)
        for number, array in enumerate(given):
            assert array.is_deleted() == (number in executable.artefact.aliases), number


def test_the_only_argument_and_the_only_result_may_share_memory():
    (x,) = arrays((64, 8))
    executable = loaded(lambda x: (x * 2, x.sum()), x, donated=(0,))
    given = x + 0
    doubled, total = executable(given)
    np.testing.assert_array_equal(doubled, x * 2)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-5)
    assert given.is_deleted()


def test_a_step_takes_arrays_in_any_layout():
    product = mpmd.named_computation(lambda x, w: jnp.tanh(x @ w) + w, name="product")
    config = mpmd.make_config(mpmd.make_topology({"m0": 1}), {"product": "m0"})
    x, w = arrays((5, 5), (5, 5))
    step = mpmd.jit(lambda x, w: product(x, w), config).lower(x, w).compile()
    w = step(x, w)  # on the device of the mesh
    other = jax.device_put(w, Format(Layout((1, 0)), w.sharding))
    wanted = np.tanh(np.asarray(x) @ np.asarray(w)) + np.asarray(w)
    for given in (w, other, w, other):
        np.testing.assert_allclose(step(x, given), wanted, rtol=1e-5, atol=1e-6)


def test_only_types_that_are_new_go_through_jax(monkeypatch):
    x, y = arrays((3, 4), (3, 4))
    checked = []

    def create_cpp_call(self, parameters):
        call = made(self, parameters)
        return lambda *arrays: (checked.append(arrays), call(*arrays))[1]

    kind = type(loaded(scaled, x, y).compiled._executable)
    made = kind.create_cpp_call
    monkeypatch.setattr(kind, "create_cpp_call", create_cpp_call)
    executable = loaded(scaled, x, y)
    for given, times in (((x, y), 1), ((y, x), 1), ((np.asarray(x), y), 2), ((x, y), 2)):
        np.testing.assert_array_equal(executable(*given)[0], scaled(*given))
        assert len(checked) == times
    with pytest.raises(TypeError):
        executable(x, y.T)
    assert len(checked) == 3


def test_without_the_short_way_calls_go_through_jax(monkeypatch):
    from jaxlib import _jax

    x, y = arrays((3, 4), (3, 4))
    monkeypatch.delattr(_jax, "ArrayImpl")
    executable = loaded(scaled, x, y)
    for _ in range(2):
        np.testing.assert_array_equal(executable(x, y)[0], scaled(x, y))
    with pytest.raises(TypeError):
        executable(x, y.T)
