"""Leaving passes out by name through the options of a configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

import mpmd
from mpmd.options import USER_DEFAULTS
from mpmd.partition.lowering import stitches_attention


def lowered(**options):
    named = mpmd.named_computation(lambda x: jnp.sin(x) + 2.0 * 3.0, name="f")
    config = mpmd.make_config(
        mpmd.make_topology({"m0": 1}), {"f": "m0"}, options=dataclasses.replace(USER_DEFAULTS, **options)
    )
    return mpmd.jit(lambda x: named(x) + jnp.arcsinh(x - x), config).lower(jnp.ones(4))


def stems(folder: Path) -> set[str]:
    return {file.stem.partition(".")[2] for file in folder.rglob("*.mlir")}


@pytest.mark.parametrize("name", ["canonicalize", "chlo-legalize-to-stablehlo", "mpmd-fragment-dedup"])
def test_a_pass_that_is_left_out_does_not_run(name, tmp_path):
    lowered(dump_to=str(tmp_path / "with"))
    assert name in stems(tmp_path / "with")
    lowered(dump_to=str(tmp_path / "without"), disable_passes=(name,))
    assert name not in stems(tmp_path / "without")


def test_attention_is_stitched_where_fragments_are_ours():
    """On GPUs on request, as the backend is; never where one mesh is XLA's."""
    assert stitches_attention("auto", {"cpu"}) and stitches_attention("native", {"cpu", "gpu"})
    assert stitches_attention("native", {"gpu"})
    others = [("xla", {"cpu"}), ("auto", {"gpu"}), ("auto", {"cpu", "gpu"}), ("native", {"tpu"})]
    assert not any(stitches_attention(*other) for other in others)
