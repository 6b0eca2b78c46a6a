"""Programs cut for the devices of a mesh compute what they compute whole: random operations and shardings."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.meshes import evaluated, part, partitioned
from tests.support.partitioned_functions import FUNCTIONS

pytestmark = pytest.mark.usefixtures("plain_xla")

MESHES = ({"x": 2}, {"x": 4}, {"x": 2, "y": 2}, {"x": 4, "y": 2})


@st.composite
def specs(draw, dims, axes):
    """How an array is cut: every axis along one of the dims that it divides, or along none."""
    found = [[] for _ in dims]
    for name in draw(st.permutations(list(axes))):
        parts = [int(np.prod([axes[a] for a in names])) * axes[name] for names in found]
        fits = [d for d, size in enumerate(dims) if size % parts[d] == 0]
        chosen = draw(st.sampled_from([*fits, None]))
        if chosen is not None:
            found[chosen].append(name)
    return found


def check(name, data):
    function, arguments = FUNCTIONS[name]
    axes = data.draw(st.sampled_from(MESHES))
    given_specs = [data.draw(specs(np.shape(a), axes)) for a in arguments]
    wanted = [np.asarray(w) for w in jax.tree.leaves(jax.jit(function)(*arguments))]
    wanted_specs = [data.draw(specs(w.shape, axes)) for w in wanted]
    module = partitioned(function, arguments, axes, given_specs, wanted_specs)
    arrays = [np.asarray(a) for a in arguments]
    for device, row in enumerate(evaluated(module, arrays, axes, given_specs)):
        for got, whole, spec in zip(row, wanted, wanted_specs, strict=True):
            np.testing.assert_allclose(got, part(whole, spec, axes, device), rtol=2e-5, atol=2e-5)


@pytest.mark.fast_cases(28)
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_function_cut_for_devices_is_the_function(name, data):
    check(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_function_cut_for_devices_is_the_function_in_every_way(name, data):
    check(name, data)
