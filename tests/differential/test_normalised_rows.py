"""Rows that are normalised before a product stay in the range of their type."""

from __future__ import annotations

import numpy as np
import pytest

import mpmd


@pytest.mark.parametrize("backend", ["native", "xla"])
@pytest.mark.parametrize("scale", [1e24, 1e-24])
def test_rows_are_normalised_before_their_product(scale, backend):
    """The product of what is not normalised is infinite for large numbers, and 0 for small ones."""

    def normalised(x, v):
        return (x / x.sum(-1, keepdims=True)) @ v

    rng = np.random.default_rng(0)
    x, v = (rng.random(dims, np.float32) * np.float32(scale) for dims in ((64, 64), (64, 8)))
    config = mpmd.make_config(mpmd.make_topology({"m": 1}), {"a": "m"}, backend=backend)
    got = mpmd.jit(lambda *a: mpmd.named_computation(normalised, name="a")(*a), config)(x, v)
    np.testing.assert_allclose(got, normalised(x.astype(np.float64), v.astype(np.float64)), rtol=1e-5)
