"""Meshes that a step passes to JAX, and types of axes that it asks for: accepted, or refused in words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import PlacementError

X = jax.device_put(np.ones((4, 8), np.float32))
AUTO, EXPLICIT = ((kind,) * 2 for kind in (AxisType.Auto, AxisType.Explicit))
AXES = {"x": 2, "y": 1}


def traced(fn, *more, topology=None, **options):
    config = mpmd.make_config(topology or mpmd.make_topology({"m0": AXES}), {"f": "m0"}, **options)
    return mpmd.jit(mpmd.named_computation(fn, name="f"), config).trace(X, *more)


def mesh_of(types):
    return Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("x", "y"), axis_types=types)


def mapped(mesh):
    return jax.shard_map(lambda u: 2 * u, mesh=mesh, in_specs=P("x"), out_specs=P("x"))


@pytest.mark.parametrize(
    ("mesh", "explicit"),
    [
        (lambda t: t["m0"], False),
        (lambda t: t["m0"].abstract_mesh, False),
        (lambda t: AbstractMesh((2, 1), ("x", "y"), AUTO), False),
        (lambda t: mesh_of(AUTO), False),
        (lambda t: AbstractMesh((2, 1), ("x", "y"), EXPLICIT), True),
        (lambda t: mesh_of(EXPLICIT), True),
        (lambda t: None, False),
    ],
    ids=["topology", "its abstract mesh", "abstract", "mesh", "abstract, explicit", "mesh, explicit", "none"],
)
def test_a_shard_map_takes_any_mesh_of_the_same_axes(mesh, explicit):
    topology = mpmd.make_topology({"m0": AXES})
    found = traced(mapped(mesh(topology)), topology=topology, in_shardings=P("x"))
    assert found.explicit is explicit


def test_axes_are_explicit_only_where_the_step_asks_for_it():
    topology = mpmd.make_topology({"m0": mesh_of((AxisType.Explicit, AxisType.Auto))})
    assert not traced(jnp.tanh, topology=topology).explicit
    found = traced(
        lambda x: jax.lax.with_sharding_constraint(jax.reshard(x, P("x")), P(None, "y")), topology=topology
    )
    assert found.explicit  # of them `x`; a constraint takes automatic axes only


def test_arguments_have_the_types_of_in_shardings_or_their_own():
    seen = []

    def typed(*values):
        jax.reshard(values[0], P("x"))
        seen.append([jax.typeof(value).sharding.spec for value in values])
        return values

    own = jax.device_put(X, NamedSharding(mesh_of(EXPLICIT), P(None, "x")))
    traced(typed, own, own, X, in_shardings=(None, None, P("x"), None))
    assert seen[-1] == [P(None, None), P(None, "x"), P("x", None), P(None, None)]


def test_another_mesh_is_refused_in_words():
    elsewhere = AbstractMesh((4,), ("z",))
    where = r"test_traced_axes.py:\d+, in step"

    def step(x):
        return jax.shard_map(lambda u: 2 * u, mesh=elsewhere, in_specs=P("z"), out_specs=P("z"))(x)

    with pytest.raises(
        PlacementError, match=f"needs another mesh than its topology has, at .*{where}"
    ) as refused:
        traced(step)
    assert "the axes of the topology are x=2, y=1" in str(refused.value)


def test_kinds_of_meshes_that_no_context_fits_at_a_time_are_refused():
    def step(x):
        bare = AbstractMesh((2, 1), ("x", "y"), AUTO)
        return mapped(bare)(mapped(mesh_of(AUTO))(x))

    with pytest.raises(PlacementError, match="or give all calls the same mesh of the topology"):
        traced(step)


def test_what_jax_says_of_explicit_axes_is_not_reworded():
    with pytest.raises(ValueError, match="zzz.*not found in mesh"):
        traced(lambda x: jax.reshard(x, P("zzz")))
    with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
        traced(lambda x: jax.reshard(x.T, P(None, "x")) @ jax.reshard(x, P("x", None)))
