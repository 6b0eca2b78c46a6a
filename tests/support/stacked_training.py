"""A step over stacked layers for any number of stages, with its initialization."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import mpmd

LAYERS, WIDTH, ROWS = 4, 16, 8


def init(key: jax.Array) -> dict[str, Any]:
    """Parameters, momenta, a step counter that is a Python number, and a random key."""
    inward, layers, outward, noise = jax.random.split(key, 4)

    def layer(k: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.nn.initializers.lecun_normal()(k, (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)}

    params = {
        "inward": jax.random.normal(inward, (WIDTH, WIDTH)) * 0.1,
        "layers": jax.vmap(layer)(jax.random.split(layers, LAYERS)),
        "outward": jax.random.normal(outward, (WIDTH, WIDTH)) * 0.1,
    }
    return {"params": params, "momenta": jax.tree.map(jnp.zeros_like, params), "step": 0, "key": noise}


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = x @ params["inward"]
    h, _ = jax.lax.scan(lambda h, p: (h + jnp.tanh(h @ p["w"] + p["b"]), None), h, params["layers"])
    return jnp.mean((h @ params["outward"] - y) ** 2)


def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    value, grads = mpmd.accumulate_gradients(loss, 2)(state["params"], x, y)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momenta)
    noise, _ = jax.random.split(state["key"])
    return {"params": params, "momenta": momenta, "step": state["step"] + 1, "key": noise}, value


def batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x, y = random.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return x, y


def jitted(stages: int, devices: int = 1, **options: Any) -> Any:
    """The step with its layers divided over stages, and its weights over the devices of each."""
    topology = mpmd.make_topology({f"m{k}": {"model": devices} for k in range(stages)})
    shardings = None
    if devices > 1:
        over = PartitionSpec("model")
        layers = {"w": PartitionSpec(None, None, "model"), "b": None}
        one = {"inward": over, "layers": layers, "outward": over}
        shardings = ({"params": one, "momenta": one, "step": None, "key": None}, None, None)
    config = mpmd.make_config(topology, stages=mpmd.split("layers"), in_shardings=shardings, **options)
    return mpmd.jit(step, config, donate_argnums=0)


def numbers(tree: Any) -> dict[str, np.ndarray]:
    """The leaves by their paths, in host memory; stacks whole, random keys as integers."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda v: isinstance(v, mpmd.Stacked))

    def host(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return {jax.tree_util.keystr(path): host(leaf) for path, leaf in flat}


def assert_equal(got: Any, want: Any, close: float = 0.0) -> None:
    """Equal paths and dtypes, and equal numbers, but for a relative difference."""
    got, want = numbers(got), numbers(want)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        assert got[path].dtype == leaf.dtype, path
        np.testing.assert_allclose(got[path], leaf, rtol=close, err_msg=path)
