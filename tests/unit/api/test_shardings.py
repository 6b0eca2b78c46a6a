"""Shardings of arguments and results, as a script has them for `jax.jit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import ConfigError

X = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4))
PLACES = {"first": "m0", "second": "m1"}
STATE = jax.device_put({name: n * np.eye(4, dtype=np.float32) for n, name in ((1, "first"), (2, "second"))})


def step(state, x):
    h = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="first")(state["first"], x)
    y = mpmd.named_computation(lambda w, h: h @ w, name="second")(state["second"], h)
    return {name: w + y.mean() for name, w in state.items()}, y


def on(meshes=None, **more):
    topology = mpmd.make_topology(meshes or {"m0": {"data": 2}, "m1": {"data": 2}})
    return topology, mpmd.make_config(topology, PLACES, **more)


def shardings_of(tree):
    return jax.tree.map(lambda value: value.sharding, tree)


@pytest.mark.slow
def test_what_a_step_returns_is_where_the_next_one_takes_it():
    """Its results' shardings, given to `mpmd.jit` as to `jax.jit`, are those of the arguments and results."""
    topology, config = on()
    state, y = mpmd.jit(step, config, in_shardings=(None, P("data")))(STATE, X)
    own = {name: NamedSharding(topology[mesh], P("data")) for name, mesh in PLACES.items()}
    again = mpmd.jit(step, config, in_shardings=(own, None), out_shardings=(own, shardings_of(y)))
    compiled = again.compiled(state, X)
    new, z = compiled(state, X)
    for found in (compiled.input_shardings[0][0], shardings_of(new)):
        assert all(sharding.is_equivalent_to(own[name], 2) for name, sharding in found.items())
    assert z.sharding.is_equivalent_to(y.sharding, 2)
    assert jnp.allclose(z, step(jax.device_get(state), X)[1], atol=1e-6)


def test_a_sharding_over_other_devices_names_axes_only():
    _, config = on()
    elsewhere = NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))
    taken = mpmd.jit(step, config, in_shardings=(elsewhere, None)).compiled(STATE, X).input_shardings[0][0]
    assert [sharding.mesh.size for sharding in taken.values()] == [2, 2]
    assert {sharding.spec for sharding in taken.values()} == {P("data", None)}


def test_a_sharding_over_the_devices_of_a_mesh_names_the_mesh():
    topology, config = on()
    there = NamedSharding(topology["m0"], P("data"))
    for given, mesh in ((P("data"), "m1"), (there, "m0")):
        text = mpmd.jit(step, config, out_shardings=(None, given)).lower(STATE, X).as_text("program")
        fetched = [line for line in text.splitlines() if line.startswith("mesh") or "as output 2" in line]
        assert fetched[[" as output 2" in line for line in fetched].index(True) - 1].startswith(
            f"mesh {mesh}"
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"in_shardings": (None, P(unreduced={"data"}))}, "argument x: .* are whole sums; leave unreduced"),
        ({"out_shardings": (None, P(reduced={"data"}))}, r"result\[1\]: .* leave unreduced and reduced out"),
        ({"in_shardings": (None, P(P.UNCONSTRAINED))}, "argument x: .* has UNCONSTRAINED for a dim"),
        (
            {"in_shardings": (None, SingleDeviceSharding(jax.devices()[0]))},
            "argument x: SingleDeviceSharding.* is neither a jax.sharding.PartitionSpec nor a NamedSharding",
        ),
    ],
)
def test_shardings_that_have_no_meaning_for_a_step(more, message):
    with pytest.raises(ConfigError, match=message):
        mpmd.jit(step, on()[1], **more).lower(STATE, X)


def test_a_mesh_that_is_not_that_of_the_devices_is_refused():
    topology, config = on(input_meshes=(None, "m0"))
    there = NamedSharding(topology["m1"], P("data"))
    with pytest.raises(
        ConfigError, match=r"input_meshes names the mesh 'm0', but .* is over the devices of 'm1'"
    ):
        mpmd.jit(step, config, in_shardings=(None, there)).lower(STATE, X)


def test_shardings_are_given_once():
    with pytest.raises(ConfigError, match="mpmd.jit and its config both have in_shardings"):
        mpmd.jit(step, on(in_shardings=P())[1], in_shardings=P("data"))


def test_devices_that_meshes_share_name_no_mesh():
    with pytest.warns(UserWarning, match="share"):
        topology = mpmd.make_topology({"m0": jax.devices()[:2], "m1": jax.devices()[:2]})
    config = mpmd.make_config(topology, PLACES, input_meshes=(None, "m0"))
    sharding = NamedSharding(topology["m1"], P("data"))
    assert mpmd.jit(step, config, in_shardings=(None, sharding)).lower(STATE, X)
