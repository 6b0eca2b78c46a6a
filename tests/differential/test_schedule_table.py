"""Stages × microbatches × schedules: equal results, and no program or message more than needed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import mpmd
from examples.workloads.models import MODELS
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from tests.support.comparing import copied, messages_by_route, programs_per_mesh, relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

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
    assert messages_by_route(program) == model.flow(stages).needed(microbatches)
    per_mesh = programs_per_mesh(program)
    assert len(per_mesh) == stages
    assert max(per_mesh.values()) <= model.programs, program.executables


@pytest.mark.fast_cases
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 1), (4, 8)])
def test_an_mlp_sends_an_activation_and_a_gradient_per_boundary_and_microbatch(
    stages, microbatches, schedule
):
    check_size("mlp", stages, microbatches, schedule)


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", ["skip", "tied", "shared_by_all", "batch_everywhere", "frozen_first"])
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


def clipped_sgd(state, grads):
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.1 * g * jnp.minimum(1.0, 0.5 / norm), state, grads)


@pytest.mark.parametrize("stages", STAGES)
def test_the_norm_of_all_gradients_sends_one_scalar_from_each_stage_to_each_other(stages):
    """Each stage needs the sums of all others, and sends its own once, however many parameters it has."""
    params, loss, batch = built("mlp", stages)
    step = training_step(lambda state, *b: loss(state, *b), 4, lambda state, g: (clipped_sgd(state[0], g),))
    program = pipelined(step, stages).lower((params,), *batch).program
    needed = MODELS["mlp"].flow(stages).needed(4)
    sums = {(a, b): 1 for a in range(stages) for b in range(stages) if a != b}
    assert messages_by_route(program) == {r: needed.get(r, 0) + sums[r] for r in sums}


def test_a_step_for_the_loss_alone_sends_nothing_back():
    params, loss, batch = built("mlp", 3)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, 4)(params, *batch)[0]

    assert messages_by_route(pipelined(step, 3).lower(params, *batch).program) == {(0, 1): 4, (1, 2): 4}


def test_the_listing_shows_every_send():
    state, step, batch = state_and_step("tied", 3, 4)
    lowered = pipelined(step, 3).lower(state, *batch)
    sends = [line for line in lowered.as_text("program").splitlines() if " send %" in line]
    assert len(sends) == sum(MODELS["tied"].flow(3).needed(4).values())


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
