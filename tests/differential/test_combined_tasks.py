"""A forward of one microbatch and a backward of another in one program."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import jax
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from examples.workloads.models import normal
from tests.support.comparing import relative_difference
from tests.support.evaluate_mpmd import evaluate

pytestmark = pytest.mark.usefixtures("plain_xla")

MICROBATCHES = 8


def loss_fn(params, x):
    for w in params["layers"]:
        x = jax.numpy.tanh(x @ w)
    return (x**2).mean()


def step(params, x, microbatches=MICROBATCHES):
    loss, grads = mpmd.accumulate_gradients(loss_fn, microbatches)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


GIVEN = {"layers": [normal(k, 4, 4) for k in range(3)]}, normal(9, 2 * MICROBATCHES, 4)


def lowered_by(schedule, devices=1, in_shardings=None, microbatches=MICROBATCHES):
    topology = mpmd.make_topology({f"m{m}": {"data": devices} for m in range(3)})
    stages = mpmd.by_parameters(r"layers/(\d+)")
    config = mpmd.make_config(topology, stages=stages, schedule=schedule, in_shardings=in_shardings)
    return mpmd.jit(lambda *given: step(*given, microbatches), config).lower(*GIVEN)


def runs(lowered, pattern=r"_(stage\d\w*?)_calls?\d"):
    """How often programs run, by a part of their names."""
    return Counter(re.findall(rf" run \w*?{pattern}", lowered.as_text("program")))


def test_it_computes_what_jax_does_in_fewer_programs_and_no_mesh_waits():
    """Each mesh runs ahead so far that its pairs do not wait for those of its neighbours in turns."""
    lowered = lowered_by("combined_1f1b")
    got = evaluate(lowered.partitioned.module, jax.tree.leaves(GIVEN))
    assert relative_difference(got, jax.tree.leaves(jax.jit(step)(*GIVEN))) < 1e-5
    assert not lowered.warnings
    ran = runs(lowered)
    for stage, following in enumerate((2, 1, 0)):
        ahead = 2 * following + 1
        assert ran[f"stage{stage}_fwd_bwd"] == MICROBATCHES - ahead, ran
        assert ran[f"stage{stage}_fwd"] == ran[f"stage{stage}_bwd"] == ahead
    seconds = {"_fwd_bwd": 3.0, "_fwd": 1.0, "_bwd": 2.0}
    costs = {
        name: next((s for part, s in seconds.items() if part in name), 0.0) for name in lowered.fragments
    }
    spans = [span for span in lowered.schedule(costs).compute("m1") if "stage1_fwd_bwd" in span.name]
    assert [b.start_s - a.end_s for a, b in itertools.pairwise(spans)] == [0.0] * (MICROBATCHES - 4)


@pytest.mark.parametrize("split", [P(), P("data")], ids=["whole", "fsdp"])
def test_gradients_are_reduced_and_weights_gathered_once_in_a_step(split):
    """As without pairs, whose forward and backward read the rows of two microbatches."""
    apart, combined = (lowered_by(schedule, 2, (split, P("data"))) for schedule in ("gpipe", "combined_1f1b"))
    once = runs(combined, r"_(reduce|gather)[._]")
    assert once == runs(apart, r"_(reduce|gather)[._]")
    assert once == ({"reduce": 4, "gather": 3} if split else {"reduce": 4})  # three gradients, and the loss


@pytest.mark.slow
@pytest.mark.parametrize("split", [P(), P("data")], ids=["whole", "fsdp"])
def test_it_runs_on_several_devices(split):
    compiled = lowered_by("combined_1f1b", 2, (split, P("data"))).compile()
    assert relative_difference(compiled(*GIVEN), jax.jit(step)(*GIVEN)) < 1e-5


def test_meshes_that_do_nothing_but_warm_up_combine_nothing():
    """The first mesh would run five forwards ahead; its last forward is no pair with a backward."""
    lowered = lowered_by("combined_1f1b", microbatches=4)
    assert not lowered.warnings
    ran = runs(lowered)
    assert [ran[f"stage{s}_fwd_bwd"] for s in range(3)] == [0, 1, 3]


def test_the_last_forward_and_its_backward_stay_one_program():
    """One microbatch has no other to be combined with."""
    text = lowered_by("combined_1f1b", microbatches=1).as_text("program")
    assert len(re.findall(r" run \w*stage2_fwd_bwd", text)) == 1
