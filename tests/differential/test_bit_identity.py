"""Where accumulated gradients are those of `jax.jit` bit for bit: docs/decisions/bit-identity.md.

They are compared with the same step under `jax.jit`, where the loop over microbatches is a `lax.scan`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

import mpmd
from examples.workloads.flax_models import FLAX_MODELS
from examples.workloads.models import MODELS, chain, dense, dense_params, normal
from examples.workloads.steps import pipelined
from mpmd.options import USER_DEFAULTS
from tests.support.comparing import relative_difference

ALL = MODELS | FLAX_MODELS
APART = {"merge_forward_with_backward": False}  # forward and backward of the last stage are two programs
IDENTICAL = {
    "mlp",
    "uneven",
    "skip",
    "batch_everywhere",
    "shapes_change",
    "dropout",
    "checkpointed",
    "checkpointed_whole",
    "stacked",
    "frozen_first",
    "unused_parameter",
    "half_precision",
    "custom_gradient",
    "scanned_layers",
    "linen_modules",
    "nnx_modules",
}
IDENTICAL_APART = {"mixture"}
# One weight on several stages: each stage adds up its microbatches, then the stages are added up.
SHARED = {"shared_by_all"}
# XLA compiles attention another way when all of it is one program.
COMPILED_OTHERWISE = {"transformer", "tied"}
FAST = {"mlp", "skip"}


def step_of(loss, microbatches):
    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, microbatches)(params, *batch)

    return step


@functools.cache
def expected(name, stages, microbatches):
    params, loss, batch = ALL[name].build(stages)
    return jax.jit(step_of(loss, microbatches))(params, *batch)


def found(name, stages=2, microbatches=4, schedule="1f1b", **options):
    params, loss, batch = ALL[name].build(stages)
    chosen = {"options": dataclasses.replace(USER_DEFAULTS, backend="xla", **options)}
    return pipelined(step_of(loss, microbatches), stages, schedule, options=chosen)(params, *batch)


def differing(got, want):
    """The paths of the leaves that are not equal bit for bit, with their largest difference."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    return {
        jax.tree_util.keystr(path): float(np.abs(np.subtract(a, b, dtype=np.float64)).max())
        for (path, a), b in pairs
        if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    }


def test_the_table_has_every_model():
    classes = IDENTICAL, IDENTICAL_APART, SHARED, COMPILED_OTHERWISE
    assert set().union(*classes) == set(ALL)
    assert sum(map(len, classes)) == len(ALL)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in sorted(IDENTICAL)]
)
def test_loss_and_gradients_are_identical(name):
    assert differing(found(name), expected(name, 2, 4)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(IDENTICAL_APART))
def test_they_are_identical_where_forward_and_backward_are_programs_of_their_own(name):
    assert differing(found(name, **APART), expected(name, 2, 4)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 8), (3, 2), (4, 4)])
def test_they_are_identical_whatever_the_schedule(stages, microbatches, schedule):
    got = found("mlp", stages, microbatches, schedule)
    assert differing(got, expected("mlp", stages, microbatches)) == {}


@pytest.mark.slow
def test_schedules_do_not_change_a_bit():
    """Microbatches are added up in their order under every schedule, if the programs are the same."""
    assert differing(found("tied", schedule="gpipe", **APART), found("tied", schedule="1f1b", **APART)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHARED))
def test_only_a_weight_of_several_stages_is_added_up_in_another_order(name):
    assert set(differing(found(name), expected(name, 2, 4))) <= {"[1]['shared']"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHARED | COMPILED_OTHERWISE | IDENTICAL_APART))
def test_the_others_differ_by_rounding_alone(name):
    assert relative_difference(found(name), expected(name, 2, 4)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("swap", [True, False])
def test_products_that_are_swapped_are_added_up_in_the_same_order(swap):
    """Larger products go to another kernel of XLA."""
    params = {f"s{s}": dense_params(s, 256, 256) for s in range(2)}
    step, batch = step_of(chain(2, dense), 4), (normal(7, 256, 256), normal(8, 256, 256))
    options = {"options": dataclasses.replace(USER_DEFAULTS, backend="xla", swap_transposed_dots=swap)}
    assert differing(pipelined(step, 2, options=options)(params, *batch), jax.jit(step)(params, *batch)) == {}
