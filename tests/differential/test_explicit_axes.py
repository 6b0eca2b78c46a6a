"""Steps written for explicit axes compute what `jax.jit` computes under a mesh that has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

AXES = {"data": 2, "model": 2}
ROWS = P("data", None)


def rows(x):
    return jax.reshard(x, ROWS)


def of_tokens(p, x):
    return p["w"].at[jnp.argmax(rows(x), 1)].get(out_sharding=ROWS)


def looped(p, x):
    weights = jax.reshard(jnp.stack([p["w"], p["v"]]), P(None, None, "model"))
    return jax.lax.scan(
        lambda c, w: (jnp.einsum("bi,ij->bj", c, w, out_sharding=ROWS), None), rows(x), weights
    )[0]


def tensor_parallel(p, x):
    up, down = jax.reshard(p["w"], P(None, "model")), jax.reshard(p["v"], P("model", None))
    hidden = jnp.tanh(jnp.einsum("bi,ij->bj", rows(x), up, out_sharding=P("data", "model")))
    return jnp.einsum("bj,jk->bk", hidden, down, out_sharding=ROWS)


def unreduced(p, x):
    terms = P("data", None, unreduced={"model"})
    wide, down = jax.reshard(x, P("data", "model")), jax.reshard(p["v"], P("model", None))
    return jax.reshard(jnp.einsum("bj,jk->bk", wide, down, out_sharding=terms), ROWS)


def centred(part, w):
    return part - jax.lax.pmean(part @ w, "data")


LAYERS = {
    "reshard": lambda p, x: jnp.tanh(rows(x @ p["w"])) @ p["v"],
    "reshard to a type": lambda p, x: jax.reshard(x @ p["w"], jax.typeof(rows(x)).sharding),
    "tensor parallel": tensor_parallel,
    "unreduced": unreduced,
    "reduced": lambda p, x: rows(x) @ jax.reshard(p["w"], P(None, None, reduced={"data"})),
    "tokens": of_tokens,
    "scan": looped,
    "remat": lambda p, x: jax.checkpoint(tensor_parallel)(p, x),
    "cond": lambda p, x: jax.lax.cond(p["w"].sum() > 0, lambda v: rows(v @ p["w"]), rows, x),
    "vmap": lambda p, x: jax.vmap(lambda r: r @ p["w"], spmd_axis_name="data")(rows(x)),
    "auto_axes": lambda p, x: jax.sharding.auto_axes(lambda v, w: jnp.tanh(v @ w), out_sharding=ROWS)(
        x, p["w"]
    ),
    "an assertion": lambda p, x: jax.lax.with_sharding_constraint(rows(x) @ p["w"], ROWS),
    "shard_map": lambda p, x: jax.shard_map(centred, in_specs=(ROWS, P(None, None)), out_specs=ROWS)(
        rows(x), p["w"]
    ),
    "shard_map by types": lambda p, x: jax.shard_map(centred, out_specs=ROWS)(rows(x), p["w"]),
}


def values(*dims, seed=0):
    return (0.4 * np.random.default_rng(seed).standard_normal(dims)).astype(np.float32)


PARAMS = [{"w": values(8, 8, seed=i), "v": values(8, 8, seed=i + 5)} for i in range(2)]
X = values(8, 8)


def step_of(layer, named=False):
    def stage(p, x):
        return rows(x) + layer(p, x)

    def loss(params, x):
        for i, p in enumerate(params):
            x = (mpmd.named_computation(stage, name=f"s{i}") if named else stage)(p, x)
        return jnp.mean(x**2)

    return lambda params, x: mpmd.accumulate_gradients(loss, 2)(params, x)


def split(params, spec):
    """Weights on a mesh with explicit axes, which are then their types."""
    sharding = NamedSharding(jax.make_mesh((2, 2), ("data", "model")), spec)
    return jax.device_put(params, sharding)


def by_jit(step, params=PARAMS):
    """The results of `jax.jit` under a mesh with explicit axes."""
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"))):
        return jax.device_get(jax.jit(step)(params, jax.device_put(X, ROWS)))


def ours(step, named=False, **options):
    topology = mpmd.make_topology({"m0": AXES, "m1": AXES})
    where = (
        {"assignment": {"s0": "m0", "s1": "m1"}}
        if named
        else {"stages": mpmd.by_parameters(r"\[?(\d+)\]?.*")}
    )
    return mpmd.jit(step, mpmd.make_config(topology, **where, **options))


@pytest.mark.fast_cases("unreduced-native-named")
@pytest.mark.parametrize("named", [False, True], ids=["stages", "named"])
@pytest.mark.parametrize("backend", ["xla", "native"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_step_equals_jit_under_explicit_axes(layer, backend, named):
    step = step_of(LAYERS[layer], named)
    jitted = ours(step, named, backend=backend, in_shardings=(None, P("data")))
    assert relative_difference(jax.device_get(jitted(PARAMS, X)), by_jit(step)) < 1e-5


def test_weights_are_gathered_and_gradients_reduced_once():
    whole = P(None, None)
    fsdp = lambda p, x: jnp.tanh(rows(x) @ jax.reshard(p["w"], whole)) @ jax.reshard(p["v"], whole)  # noqa: E731
    split = {"w": P("data"), "v": P("data")}
    fragments = ours(step_of(fsdp), in_shardings=([split] * 2, P("data"))).lower(PARAMS, X).fragments
    kinds = [name.partition(".")[0].partition("_")[2] for name in fragments]
    assert kinds.count("gather") == kinds.count("reduce") == 2


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["auto", mpmd.split("layers")], ids=["auto", "split"])
def test_stages_from_outside_of_stacked_layers(stages):
    def loss(params, x):
        return jnp.mean(
            jax.lax.scan(lambda c, p: (rows(c) + tensor_parallel(p, c), None), rows(x), params["layers"])[0]
        )

    step = lambda params, x: mpmd.accumulate_gradients(loss, 2)(params, x)  # noqa: E731
    params = {"layers": {"w": values(4, 8, 8), "v": values(4, 8, 8, seed=1)}}
    specs = {"layers": {"w": P(None, None, "model"), "v": P(None, "model", None)}}
    topology = mpmd.make_topology({"m0": AXES, "m1": AXES})
    jitted = mpmd.jit(step, mpmd.make_config(topology, stages=stages, in_shardings=(specs, P("data"))))
    value, grads = jitted(params, X)
    grads = jax.tree.map(
        lambda g: g.whole() if isinstance(g, mpmd.Stacked) else g,
        jax.device_get(grads),
        is_leaf=lambda g: isinstance(g, mpmd.Stacked),
    )
    assert relative_difference((jax.device_get(value), grads), by_jit(step, params)) < 1e-5


@pytest.mark.slow
def test_arrays_with_other_types_are_another_program():
    """A `shard_map` takes its specs from the types of what it is given: the same call, another meaning."""

    def summed(p, x):
        wide = jax.reshard(x, P("data", jax.typeof(p["w"]).sharding.spec[0]))
        return jax.shard_map(lambda a, w: jax.lax.psum(a @ w, "model"), out_specs=ROWS)(wide, p["w"])

    step = step_of(summed)
    jitted = ours(step, in_shardings=(None, P("data")))
    ran = set()
    for spec in (P("model", None), P(None, None), P("model", None)):
        params = split(PARAMS, spec)
        ran.add(jitted.compiled(params, X))
        assert relative_difference(jax.device_get(jitted(params, X)), by_jit(step, params)) < 1e-5
    assert len(ran) == 2
