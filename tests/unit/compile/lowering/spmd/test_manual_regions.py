"""Regions of `jax.shard_map` in programs of devices, whatever encloses them, and with any split outside."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from tests.support.manual_regions import AXES, LAYERS, nested
from tests.support.meshes import evaluated, part, partitioned

DIMS = [[], ["e"], ["d"], ["e", "d"], ["d", "e"]]
MESH = AbstractMesh(tuple(AXES.values()), tuple(AXES), (AxisType.Auto,) * 2)


def values(*dims, seed=0):
    return (0.4 * np.random.default_rng(seed).standard_normal(dims)).astype(np.float32)


ARGUMENTS = values(8, 8), values(2, 8, 8, seed=1), values(16, 8, seed=2)


def split_of(value, rng):
    """Axes for each dim, of which none is used twice and each divides its dim."""
    found = [
        dims
        for dims in itertools.product(DIMS, repeat=value.ndim)
        if len(names := list(itertools.chain(*dims))) == len(set(names))
        and not any(size % 2 ** len(of_dim) for size, of_dim in zip(value.shape, dims))
    ]
    return list(rng.choice(found))


def with_gradients(layer):
    def fn(*arguments):
        of = lambda w, e, x: layer({"w": w, "e": e}, x)  # noqa: E731
        value, backward = jax.vjp(of, *arguments)
        return [value, *backward(jnp.cos(value))]

    return fn


def check(fn, count):
    wanted = concretely(fn)
    for seed in range(count):
        rng = random.Random(seed)
        given, specs = ([split_of(v, rng) for v in of] for of in (ARGUMENTS, wanted))
        with jax.sharding.use_abstract_mesh(MESH):
            module = partitioned(fn, ARGUMENTS, AXES, given, specs)
        for device, results in enumerate(evaluated(module, ARGUMENTS, AXES, given)):
            for got, want, spec in zip(results, wanted, specs, strict=True):
                np.testing.assert_allclose(got, part(want, spec, AXES, device), rtol=1e-4, atol=1e-5)


def concretely(fn):
    with jax.set_mesh(jax.make_mesh((2, 2), tuple(AXES), axis_types=(AxisType.Auto,) * 2)):
        return [np.asarray(value) for value in jax.jit(fn)(*ARGUMENTS)]


@pytest.mark.fast_cases("partly_manual")
@pytest.mark.parametrize("layer", LAYERS)
def test_any_split_outside_of_a_region(layer):
    check(with_gradients(LAYERS[layer]), 8)


def test_a_region_within_a_region():
    check(lambda w, e, x: [nested({"w": w, "e": e}, x)], 2)
