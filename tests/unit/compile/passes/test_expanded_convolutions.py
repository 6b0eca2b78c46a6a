"""Convolutions as products of patches."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.passes import make_pass
from tests.support.random_hlo.draft import small_integers
from tests.support.rewrite_checks import rewritten

_PLAIN = "dim_labels=b0f_0io->b0f"
CONVOLUTIONS = {
    "padding": ("2,6,3", "3,3,4", "2,6,4", f"window={{size=3 pad=1_1}}, {_PLAIN}"),
    "a reversed window": ("2,6,3", "3,3,4", "2,4,4", f"window={{size=3 rhs_reversal=1}}, {_PLAIN}"),
    "a dilated image": ("2,3,3", "5,3,4", "2,1,4", f"window={{size=5 lhs_dilate=2}}, {_PLAIN}"),
    "a dilated window": ("2,6,3", "2,3,4", "2,4,4", f"window={{size=2 rhs_dilate=2}}, {_PLAIN}"),
    "a stride": ("2,7,3", "3,3,4", "2,3,4", f"window={{size=3 stride=2}}, {_PLAIN}"),
    "groups of features": ("2,6,4", "3,2,6", "2,4,6", f"window={{size=3}}, {_PLAIN}, feature_group_count=2"),
    "groups of the batch": ("4,6,4", "3,4,6", "2,4,6", f"window={{size=3}}, {_PLAIN}, batch_group_count=2"),
    "no features": ("2,6,0", "3,0,4", "2,4,4", f"window={{size=3}}, {_PLAIN}"),
    "another order of dims": ("3,6,2", "4,3,3", "4,2,4", "window={size=3}, dim_labels=f0b_oi0->fb0"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_numbers_are_those_of_the_convolution(name):
    image, kernel, result, attributes = CONVOLUTIONS[name]
    module = parse_module(
        f"HloModule m\nENTRY e {{\n  x = f32[{image}] parameter(0)\n  k = f32[{kernel}] parameter(1)\n"
        f"  ROOT r = f32[{result}] convolution(x, k), {attributes}\n}}\n"
    )
    rng = np.random.default_rng(0)
    arguments = [small_integers(rng, "f32", p.shape.dims) for p in module.entry.parameters]
    assert rewritten(module, arguments, make_pass("hlo-convolution-expander", "least-channels=1").run)
