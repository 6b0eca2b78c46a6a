"""Models that get stages from outside, or by names, give the numbers of `jax.jit`."""

from __future__ import annotations

import warnings
from collections import Counter

import jax
import pytest
from jax.extend.core import jaxpr_as_fun

from mpmd.errors import MpmdError
from tests.support.comparing import relative_difference
from tests.support.directed import seeds
from tests.support.directed.front import Drawn, draw
from tests.support.recipes import whole

pytestmark = pytest.mark.usefixtures("plain_xla")


def check(drawn: Drawn, *, runs: bool) -> bool:
    """Whether a model gets its stages; its numbers are compared, as traced or as the meshes compute them."""
    arguments = (drawn.params, *drawn.batch)
    want = jax.jit(drawn.step())(*arguments)
    ours = drawn.jitted()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if runs or getattr(drawn.stages, "stacked", False):
                got = whole(ours(*arguments))
            else:
                traced = ours.trace(*arguments)
                flat = jax.jit(jaxpr_as_fun(traced.jaxpr))(*jax.tree.leaves(arguments))
                got = jax.tree.unflatten(traced.out_tree, flat)
    except MpmdError as error:
        assert drawn.meshes > 1, f"{drawn.text}\n{error}"
        return False
    got, want = ({"loss": tree[0], "gradients": tree[1]} for tree in (got, want))
    assert relative_difference(got, want) <= 2e-5, drawn.text
    return True


def accepted(numbers, every: int) -> Counter[bool]:
    """How many models get stages; of each `every`, one is run on its meshes."""
    return Counter(check(draw(seed), runs=seed % every == 0) for seed in numbers)


def test_models_that_get_stages():
    found = accepted(seeds(3), every=3)
    assert found[True] >= found.total() / 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(20))
def test_many_models_that_get_stages(part):
    found = accepted(seeds(2000)[100 * part : 100 * part + 100], every=8)
    print(dict(found))
    assert found[True] >= found.total() / 2
