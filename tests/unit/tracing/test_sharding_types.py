"""Of the shardings that JAX lowers with explicit axes, those that the user asks for stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import PlacementError
from mpmd.tracing.trace import to_module

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def constraints(fn, types=(AxisType.Explicit, AxisType.Explicit), explicit=True):
    mesh = AbstractMesh((2, 2), ("x", "y"), types)
    topology = mpmd.make_topology({"m0": {"x": 2, "y": 2}})
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(fn, keep_unused=True).trace(X).lower(lowering_platforms=("cpu",))
    text = str(to_module(lowered, topology.ir(), explicit=explicit))
    return [
        line.partition("<@mesh, ")[2].partition(">")[0]
        for line in text.splitlines()
        if "sdy.sharding" in line
    ]


def test_types_go_and_reshards_stay():
    def step(x):
        rows = jnp.tanh(jax.reshard(x, P("x", None)))
        return jax.lax.fori_loop(0, 3, lambda _, c: c + rows, rows).sum()

    assert constraints(step) == ['[{"x"}, {}]']
    assert len(constraints(step, explicit=False)) > 5


def test_a_constraint_over_an_automatic_axis_stays():
    types = (AxisType.Explicit, AxisType.Auto)

    def step(x):
        return jax.lax.with_sharding_constraint(2 * jax.reshard(x, P("x", None)), P(None, "y"))

    assert constraints(step, types) == ['[{"x", ?}, {?}]', '[{"x"}, {"y"}]']


def test_that_a_value_is_unreduced_is_left_to_the_partitioner():
    def step(x):
        columns = jax.reshard(x, P(None, "x"))
        terms = jnp.einsum("ij,kj->ik", columns, columns, out_sharding=P(None, None, unreduced={"x"}))
        return jax.reshard(terms, P("x", None))

    assert constraints(step) == ['[{}, {"x"}]', '[{"x"}, {}]']


def test_terms_of_a_sum_at_the_border_of_a_shard_map_are_refused():
    def step(x):
        specs = {"in_specs": P("x", "y"), "out_specs": P("x", None, unreduced={"y"})}

        def terms(u):
            return jax.lax.pcast(u @ u.T @ u, "y", to="unreduced")

        return jax.reshard(jax.shard_map(terms, **specs)(jax.reshard(x, P("x", "y"))), P())

    with pytest.raises(PlacementError, match=r"unreduced over y in the out_specs of jax.shard_map, .*step"):
        constraints(step)
