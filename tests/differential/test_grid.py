"""Stages × microbatches × schedules: equal results, and no program or message more than needed."""

from __future__ import annotations

import functools

import jax
import pytest

from tests.support.comparing import (
    copied,
    messages,
    pipelined,
    programs_per_mesh,
    relative_difference,
    sgd_momentum,
    training_step,
)
from tests.support.models import MODELS

STAGES = (2, 3, 4)
MICROBATCHES = (1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b")
FAST = {(4, 2, "1f1b"), (2, 8, "gpipe")}


@functools.cache
def built(name, stages):
    return MODELS[name].build(stages)


def state_and_step(name, stages, microbatches):
    params, loss, batch = built(name, stages)
    init, update = sgd_momentum()
    return init(params), training_step(loss, microbatches, update), batch


def check_size(name, stages, microbatches, schedule):
    """Lowers only: what is sent and how many programs there are is known then."""
    model = MODELS[name]
    state, step, batch = state_and_step(name, stages, microbatches)
    program = pipelined(step, stages, schedule, donate_argnums=0).lower(state, *batch).program
    per_microbatch, per_step = model.sent_per_microbatch(stages), model.sent_per_step(stages)
    assert messages(program) == per_microbatch * microbatches + per_step
    per_mesh = programs_per_mesh(program)
    assert len(per_mesh) == stages
    assert max(per_mesh.values()) <= model.programs, program.executables


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 1), (4, 8)])
def test_an_mlp_sends_two_values_per_boundary_and_microbatch(stages, microbatches, schedule):
    check_size("mlp", stages, microbatches, schedule)


@pytest.mark.parametrize("name", ["skip", "tied", "shared_by_all", "checkpointed", "frozen_first"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_model_sends_what_its_dataflow_needs(name, stages):
    check_size(name, stages, 4, "1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_sends_what_its_dataflow_needs(name, stages, microbatches, schedule):
    check_size(name, stages, microbatches, schedule)


@functools.cache
def expected(name, stages, microbatches):
    state, step, batch = state_and_step(name, stages, microbatches)
    return jax.jit(step)(state, *batch)


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [
        pytest.param(s, m, p, marks=[] if (s, m, p) in FAST else pytest.mark.slow)
        for s in STAGES
        for m in MICROBATCHES
        for p in SCHEDULES
    ],
)
@pytest.mark.parametrize("name", ["mlp", pytest.param("tied", marks=pytest.mark.slow)])
def test_results_are_those_of_jit(name, stages, microbatches, schedule):
    """Two steps, the second on what the first one left on the meshes."""
    state, step, batch = state_and_step(name, stages, microbatches)
    want = jax.jit(step)(expected(name, stages, microbatches)[0], *batch)
    jitted = pipelined(step, stages, schedule, donate_argnums=0)
    got = jitted(jitted(copied(state), *batch)[0], *batch)
    assert relative_difference(got, want) <= 1e-5
