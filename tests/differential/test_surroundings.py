"""What is set around a step: JAX's switches, a mesh of the user's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpmd
from mpmd.errors import SignatureError
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

noise = mpmd.named_computation(lambda key, x: x + jax.random.normal(key, x.shape), name="lower")
square = mpmd.named_computation(lambda x: x * x, name="upper")
X = jax.device_put(np.arange(24, dtype=np.float32).reshape(8, 3))


def step(key, x):
    return square(noise(key, x))


def pipelined(backend="xla", **more):
    topology = mpmd.make_topology({"m0": 2, "m1": 1})
    return mpmd.jit(step, mpmd.make_config(topology, {"lower": "m0", "upper": "m1"}, backend=backend, **more))


def test_a_switch_that_tracing_reads_makes_another_program():
    """What was compiled under the other switch would give other random numbers, and nobody would notice."""
    ours, plain, key = pipelined(), jax.jit(step), jax.random.key(3)
    ran = set()
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            ran.add(ours.compiled(key, X))
            assert relative_difference(ours(key, X), plain(key, X)) < 1e-6
    assert len(ran) == 2


@pytest.mark.fast_cases
@pytest.mark.parametrize("backend", ("native", "xla"))
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_a_mesh_that_the_user_has_set(backend, kind):
    """It has other devices and other axes than the meshes of the step, which does not mind."""
    key, mesh = jax.random.key(3), jax.make_mesh((4,), ("rows",), axis_types=(kind,))
    want = jax.jit(step)(key, X)
    ours = pipelined(backend, in_shardings=(None, PartitionSpec("data")))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("rows")))
    with jax.set_mesh(mesh):
        assert relative_difference(jax.device_get(ours(key, x)), want) < 1e-6
        result, _ = ours.lower(key, x).compile().timeline(key, x)
        assert jax.sharding.get_abstract_mesh().axis_names == ("rows",)
    assert relative_difference(jax.device_get(result), want) < 1e-6
    assert relative_difference(ours(key, X), want) < 1e-6


@pytest.mark.parametrize("warm", (True, False))
def test_a_masked_array_is_refused(warm):
    """As JAX does: the mask would be lost."""
    ours, key = pipelined(), jax.random.key(3)
    if warm:
        ours(key, X)
    with pytest.raises(SignatureError, match=r"x\['a'\] is a masked array"):
        ours(key, {"a": np.ma.masked_array(np.asarray(X), np.asarray(X) > 2)})
    with pytest.raises(SignatureError, match="x is a masked array"):
        ours(key, np.ma.masked_array(np.asarray(X), np.asarray(X) > 2))


def test_cleared_caches_of_jax():
    """What a function reads beside its arguments is read again, as under `jax.jit`."""
    scale = {"by": 1.0}

    def scaled(x):
        return mpmd.named_computation(lambda x: x * scale["by"], name="upper")(x)

    topology = mpmd.make_topology({"m0": 1})
    ours = mpmd.jit(scaled, mpmd.make_config(topology, {"upper": "m0"}, backend="xla"))
    assert (ours(X) == X).all()
    scale["by"] = 3.0
    assert (ours(X) == X).all()
    held = ours.compiled(X)
    jax.clear_caches()
    assert (ours(X) == 3 * X).all()
    assert (held(X) == X).all(), "a compiled step stays what it is"


@pytest.mark.fast_cases("float")
@pytest.mark.parametrize("kind", ("float", "int", "uint", "complex"))
def test_an_array_of_64_bits_where_these_are_off(kind):
    """As under `jax.jit` it has 32, also if its memory is given to the step."""
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    config = mpmd.make_config(topology, {"upper": "m0", "lower": "m1"}, backend="xla")
    lower = mpmd.named_computation(lambda x: x + 1, name="lower")

    def step(x):
        return lower(square(x))

    bits = 128 if kind == "complex" else 64
    for more in ({}, {"donate_argnums": 0}):
        with jax.enable_x64(True):
            wide = jnp.arange(8).astype(f"{kind}{bits}")
        want = jax.jit(step)(wide)
        got = mpmd.jit(step, config, **more)(wide)
        assert got.dtype == want.dtype and (np.asarray(got) == np.asarray(want)).all()


def test_an_array_of_64_bits_of_another_shape_is_named():
    compiled = pipelined().compiled(jax.random.key(3), X)
    with jax.enable_x64(True):
        wide = jnp.ones((2, 3), "float64")
    with pytest.raises(SignatureError, match=r"x: got float32\[2,3\], compiled for float32\[8,3\]"):
        compiled(jax.random.key(3), wide)
