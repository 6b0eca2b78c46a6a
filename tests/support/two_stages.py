"""The smallest function with two stages."""

from __future__ import annotations

import jax

import mpmd


def two_stages(x: jax.Array) -> jax.Array:
    """`2 x + 1`: doubled by `first`, and one added by `second`."""
    x = mpmd.named_computation(lambda x: 2 * x, name="first")(x)
    return mpmd.named_computation(lambda x: x + 1, name="second")(x)
