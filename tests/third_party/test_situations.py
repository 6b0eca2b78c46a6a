"""Programs of public repositories under `mpmd.jit`: equal to `jax.jit`, or refused in the table's words."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.situations import SOURCE, Situation, UserStep, run, situations
from tests.support.situations.page import PAGE, page

MAX_CONFIGURATION_LINES, MIN_SITUATIONS = 5, 40


@pytest.mark.fast_cases("learning_in_a_branch", "queue_of_keys")
@pytest.mark.parametrize("found", situations(), ids=lambda found: found.name)
def test_situation(found):
    run(found)


def test_each_has_a_source_a_title_and_few_lines_of_configuration():
    found = situations()
    assert len(found) >= MIN_SITUATIONS
    assert [one.name for one in found if not SOURCE.fullmatch(one.source)] == []
    assert [one.name for one in found if not one.title] == []
    assert [one.name for one in found if one.configuration_lines > MAX_CONFIGURATION_LINES] == []


def test_the_page_says_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.support.situations --page"


def entered(factor, refused=""):
    """A situation whose step multiplies by what `factor` returns while it is traced."""

    def step(weights, x):
        grads = jax.grad(mpmd.staged(lambda weights, x: (weights[0] * x * weights[1]).sum()))(weights, x)
        return jax.tree.map(lambda w, g: w - factor() * g, weights, grads), x.sum()

    job = UserStep(
        step, [jnp.float32(2), jnp.float32(3)], (jnp.ones(2),), mpmd.by_parameters(r"(\d)"), steps=1
    )
    return Situation("owner/repository#1", refused, lambda: job)


def test_a_difference_and_a_missing_refusal_are_noticed():
    different = itertools.count(1)
    assert run(entered(lambda: 1)).startswith("equal")
    with pytest.raises(AssertionError):
        run(entered(lambda: next(different)))
    with pytest.raises(AssertionError, match="it was not refused"):
        run(entered(lambda: 1, refused="words"))
