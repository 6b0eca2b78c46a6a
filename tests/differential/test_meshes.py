"""Meshes of one, two and four devices: data and tensor sharding inside the stages."""

from __future__ import annotations

from collections import Counter

import jax
import pytest
from jax.sharding import PartitionSpec as P

from examples.workloads.models import MODELS
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from tests.support.comparing import check_training, messages, programs_per_mesh
from tests.support.sharded_layers import CASES, DATA, HIDDEN, STAGES, two_layers

pytestmark = pytest.mark.usefixtures("plain_xla")


FAST = {"two for data", "two and two, constraint", "two for tensors"}


@pytest.mark.fast_cases("two for tensors")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in FAST else pytest.mark.slow) for c in CASES]
)
def test_training_on_meshes_of_several_devices_is_that_of_one(case):
    mesh, options, constraint = CASES[case]
    params, loss, batch = two_layers(constraint)
    _, unconstrained, _ = two_layers()
    init, update = sgd_momentum()
    step = pipelined(training_step(loss, 2, update), STAGES, mesh=mesh, options=options, donate_argnums=0)
    reference = jax.jit(training_step(unconstrained, 2, update))
    check_training(step, reference, init(params), batch, steps=5)


def lowered(case, microbatches=2):
    mesh, options, constraint = CASES[case]
    params, loss, batch = two_layers(constraint)
    init, update = sgd_momentum()
    step = pipelined(training_step(loss, microbatches, update), STAGES, mesh=mesh, options=options)
    return step.lower(init(params), *batch)


@pytest.mark.fast_cases("one device, two axes", "two and two, constraint", "two for tensors")
@pytest.mark.parametrize("case", CASES)
def test_shardings_need_no_more_programs_and_messages(case):
    program = lowered(case).program
    assert messages(program) == 2 * 2
    sums = Counter(mesh for mesh, name in program.executables if "_reduce." in name)
    assert max((programs_per_mesh(program) - sums).values()) <= 4
    assert max(sums.values(), default=0) <= 1


@pytest.mark.parametrize(
    ("case", "sharding"),
    [
        ("two for data", '<@mesh, [{"data"}, {}]>'),
        ("two for data, constraint", '<@mesh, [{"data"}, {}]>'),
        ("four for data", '<@mesh, [{"data"}, {}]>'),
        ("two and two", '<@mesh, [{"data"}, {}]>'),
        ("two for tensors", None),
    ],
)
def test_activations_between_stages_are_sharded_as_inside(case, sharding):
    """A batch that is sharded over devices stays so when it is cut into microbatches."""
    program = lowered(case).program
    assert {t.sharding for channel in program.channels for t in channel.types} == {sharding}


def test_microbatches_too_small_to_split_still_run():
    params, loss, batch = two_layers()
    init, update = sgd_momentum()
    step = pipelined(training_step(loss, 8, update), STAGES, mesh={"data": 2}, options=DATA)
    check_training(step, jax.jit(training_step(loss, 8, update)), init(params), batch, steps=2)


def test_results_keep_the_shardings_that_were_asked_for():
    mesh, options, _ = CASES["two for tensors"]
    params, loss, batch = two_layers()
    init, update = sgd_momentum()
    step = pipelined(training_step(loss, 2, update), STAGES, mesh=mesh, options=options)
    (new, velocity), _ = step(init(params), *batch)
    for state in (new, velocity):
        for s in range(STAGES):
            assert state[f"s{s}"]["up"].sharding.spec == HIDDEN["up"]
            assert len(state[f"s{s}"]["up"].sharding.device_set) == 2
    again, _ = step((new, velocity), *batch)  # what a step returns is what the next one takes
    assert again[0]["s0"]["up"].sharding.spec == HIDDEN["up"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["transformer", "tied", "mixture", "shared_by_all", "scanned_layers"])
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 4}, {"data": 2, "model": 2}])
def test_models_on_sharded_batches_train_as_on_one_device(name, mesh, schedule):
    params, loss, batch = MODELS[name].build(STAGES)
    init, update = sgd_momentum()
    step = training_step(loss, 2, update)
    options = {"in_shardings": (None, *(P("data") for _ in batch))}
    jitted = pipelined(step, STAGES, schedule, mesh=mesh, options=options, donate_argnums=0)
    check_training(jitted, jax.jit(step), init(params), batch, steps=5)
