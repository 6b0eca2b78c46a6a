"""A recipe for haliax: its `Stacked` folds over layers with a scan, as Levanter's models do.

Source: marin-community/haliax:src/haliax/nn/scan.py.
"""

from __future__ import annotations

import jax
import pytest

import mpmd
from tests.support.recipes import check_recipe

pytestmark = pytest.mark.slow
eqx = pytest.importorskip("equinox")
hax = pytest.importorskip("haliax")

from haliax.nn.scan import Stacked  # noqa: E402


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_haliax(remat):
    row, width, inner, layer = (
        hax.Axis("row", 2),
        hax.Axis("width", 16),
        hax.Axis("inner", 64),
        hax.Axis("layer", 4),
    )

    class Block(eqx.Module):
        up: hax.nn.Linear
        down: hax.nn.Linear
        norm: hax.nn.LayerNorm

        @staticmethod
        def init(*, key):
            one, two = jax.random.split(key)
            return Block(
                hax.nn.Linear.init(width, inner, key=one),
                hax.nn.Linear.init(inner, width, key=two),
                hax.nn.LayerNorm.init(width),
            )

        def __call__(self, x):
            return x + self.down(hax.nn.gelu(self.up(self.norm(x))))

    layers = Stacked.init(layer, Block, gradient_checkpointing=remat)(
        key=jax.random.split(jax.random.key(0), 4)
    )
    first, last = (hax.nn.Linear.init(width, width.alias("out"), key=jax.random.key(k)) for k in (1, 2))
    params, static = eqx.partition({"first": first, "layers": layers, "last": last}, eqx.is_array)

    def loss(params, x, y):
        model = eqx.combine(params, static)
        h = model["first"](hax.named(x, (row, width))).rename({"out": "width"})
        h = model["last"](model["layers"].fold(h))
        return ((h.array - y) ** 2).mean()

    x, y = jax.random.normal(jax.random.key(3), (2, 8, 16))
    check_recipe(params, loss, (x, y), mpmd.split("layers"))
