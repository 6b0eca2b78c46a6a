"""Random steps on random meshes give `jax.jit`'s numbers."""

from __future__ import annotations

import jax
import pytest

from tests.support.comparing import copied, relative_difference
from tests.support.random_steps import draw

pytestmark = pytest.mark.usefixtures("plain_xla")

ALL = range(240)
FAST = {*range(4), 9, 14, 158}  # 158 comes to a mesh more often on its backward way than on its forward way


@pytest.mark.parametrize("seed", [s if s in FAST else pytest.param(s, marks=pytest.mark.slow) for s in ALL])
def test_a_random_step_gives_the_numbers_of_jit(seed):
    random_step = draw(seed)
    print(random_step)  # pytest shows it if the test fails
    arguments = random_step.arguments()
    want = jax.jit(random_step.step())(*copied(arguments))
    got = random_step.jitted()(*copied(arguments))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    # Sums may be taken in another order; a rounding to bfloat16 in between may then fall the other way.
    assert relative_difference(got, want) <= 2e-5
