"""Plans: what is searched, what is refused and why, and what comes out."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import ConfigError
from mpmd.planning.measure import CandidateSteps
from tests.support.comparing import relative_difference

D, ROWS, LAYERS = 256, 256, 6
PARAMS = [jax.ShapeDtypeStruct((D, D), jnp.float32)] * LAYERS
X = jax.ShapeDtypeStruct((ROWS, D), jnp.float32)


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


def step(params, x, *, num_microbatches):
    value, grads = mpmd.accumulate_gradients(loss, num_microbatches)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def planned(*args, **options):
    given = {"devices": 2, "microbatches": (4,), "schedules": ("1f1b", "gpipe"), "partition": 0} | options
    return mpmd.plan(step, *(args or (PARAMS, X)), **given)


@pytest.fixture(scope="module")
def found():
    return planned(microbatches=(2, 4, 7), device="H100")


def test_candidates_are_ranked_and_the_same_again(found):
    seconds = [candidate.step_s for candidate in found.candidates]
    assert seconds == sorted(seconds) and len(seconds) > 6
    assert {c.choice.microbatches for c in found.candidates} == {2, 4}  # 7 does not divide the rows
    again = planned(microbatches=(2, 4, 7), device="H100")
    assert str(again) == str(found) and again.as_svg() == found.as_svg()
    header, first, *_ = str(found).splitlines()
    assert header.split()[:3] == ["step", "bubble", "microbatches"] and first.split()[0] == "1"


def test_predictions_follow_the_costs(found):
    of = {
        (c.choice.meshes, c.choice.schedule, c.choice.microbatches, c.choice.rematerialise): c
        for c in found.candidates
        if len(c.choice.placement) == c.choice.meshes
    }
    plain, again = of[2, "1f1b", 4, False], of[2, "1f1b", 4, True]
    assert again.step_s > plain.step_s  # the forward is computed twice
    assert again.held[0]["residuals"] < plain.held[0]["residuals"]
    assert of[2, "gpipe", 4, False].held[0]["residuals"] > plain.held[0]["residuals"]
    assert plain.sent_bytes == 2 * ROWS * D * 4  # each row forward, and its gradient back
    assert sum(held["parameters"] for held in plain.held) == LAYERS * D * D * 4


def test_towers_are_predicted_side_by_side():
    """Two of as many layers, on two meshes each: both begin at once, and send from their own last mesh."""

    def towers(params, x, y):
        for v, w in params:  # a layer of each in turns
            x, y = jnp.tanh(x @ v), jnp.tanh(y @ w)
        return jnp.mean((x - y) ** 2)

    def step(params, x, y):
        return mpmd.accumulate_gradients(towers, 4)(params, x, y)

    only = {"schedules": ("1f1b",), "stages_per_mesh": (1,), "rematerialise": (False,), "partition": 0}
    found = mpmd.plan(step, [PARAMS[:2]] * 4, X, X, devices=4, **only)
    four = next(c for c in found.candidates if c.choice.meshes == 4)
    begin = [mesh for mesh in four.timeline.meshes if four.timeline.compute(mesh)[0].start_s == 0]
    assert begin == ["m0", "m2"]
    assert {(t.mesh, t.peer) for t in four.timeline.transfers if t.peer == "m3"} == {
        ("m1", "m3"),
        ("m2", "m3"),
    }
    assert four.sent_bytes == 3 * 2 * ROWS * D * 4  # three values forward, and their gradients back


def test_what_does_not_fit_is_refused_with_what_holds_it():
    limit = 9 * D * D * 4
    found = planned(memory=limit)
    assert all(max(candidate.peak_bytes) <= limit for candidate in found.candidates)
    assert all(
        "KiB" in c.refused or "MiB" in c.refused for c in found.refused if "on each device" in c.refused
    )
    assert any("on each device of m0, mostly residuals (" in c.refused for c in found.refused)
    with pytest.raises(ConfigError, match="no plan can be used:\n  .*on each device of m0, mostly"):
        planned(memory="10KB")


def test_devices_of_a_mesh_need_sharded_arguments():
    rows = jax.sharding.PartitionSpec("data")
    alone, shared = planned(devices=4), planned(devices=4, in_shardings=(None, rows))
    assert {c.choice.meshes for c in alone.candidates} == {4}
    assert any("no argument is sharded over data" in c.refused for c in alone.refused)
    assert {(c.choice.meshes, c.choice.devices) for c in shared.candidates} == {(4, 1), (2, 2), (1, 4)}
    uneven = planned(devices=24, in_shardings=(None, rows), schedules=("1f1b",))
    assert any("rows in a microbatch, for 3 devices" in c.refused for c in uneven.refused)


def test_the_picture_shows_the_first_plans(found, tmp_path):
    found.write_svg(tmp_path / "plan.svg")
    texts = [e.text or "" for e in ElementTree.parse(tmp_path / "plan.svg").iter() if e.tag.endswith("text")]
    assert [text[:2] for text in texts if "microbatches, meshes" in text] == ["1.", "2.", "3."]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices is 0; it must be a number from 1"),
        ({"memory": "80 apples"}, "memory is '80 apples'; it must be bytes, or a text such as '80GiB'"),
        ({"schedules": ("1g1b",)}, "schedules is .*; there are gpipe, 1f1b"),
        ({"device": "H1000"}, "no description of a device 'H1000'.*H100"),
        (
            {"microbatches": (7, 9)},
            "no number of microbatches can be used:\n  7 microbatches: a batch cannot",
        ),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(ConfigError, match=message):
        planned(**options)


def test_the_number_of_microbatches_is_an_argument_of_the_step():
    def fixed(params, x):
        return mpmd.accumulate_gradients(loss, 4)(params, x)

    with pytest.raises(ConfigError, match="fixed has no argument num_microbatches\n  write def fixed"):
        mpmd.plan(fixed, PARAMS, X, devices=2, microbatches=(2, 4))
    found = mpmd.plan(fixed, PARAMS, X, devices=2, schedules=("1f1b",), partition=0)
    assert {c.choice.microbatches for c in found.candidates} == {4}
    with pytest.raises(ConfigError, match="no loss to divide is in <lambda>"):
        mpmd.plan(lambda params, x: loss(params, x), PARAMS, X, devices=2)


def peaks_of(found, rank, *args):
    """The peaks of each mesh's devices: those predicted for a candidate, and those of its compiled step."""
    choice = found.candidates[rank].choice
    compiled = mpmd.jit(found.step_of(rank), found.config_of(rank), donate_argnums=0).lower(*args).compile()
    memory = compiled.memory_analysis()
    peaks = [memory[f"m{mesh}"].peak_bytes / choice.devices for mesh in range(choice.meshes)]
    compiled.close()
    return found.candidates[rank].peak_bytes, peaks


def normalized(params, x):
    for w in params:
        h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(h @ w)
    return jnp.mean(x**2)


def attending(params, x):
    x = x.reshape(-1, 16, D)
    for w in params:
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w, x) / D)
        x = x + jnp.einsum("bqk,bkd->bqd", weights, x)
    return jnp.mean(x**2)


MESHES = {"one": {"data": 1}, "data": {"data": 2}, "model": {"data": 2, "model": 2}}


@pytest.mark.parametrize(
    "mesh", ["one", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("data", "model"))]
)
@pytest.mark.parametrize(
    "of_model", [loss, *(pytest.param(of, marks=pytest.mark.slow) for of in (normalized, attending))]
)
def test_the_peak_is_that_of_the_compiled_step(of_model, mesh):
    def trained(params, x, *, num_microbatches=4):
        value, grads = mpmd.accumulate_gradients(of_model, num_microbatches)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    axes, params = MESHES[mesh], [np.eye(D, dtype=np.float32)] * 4
    x = np.ones((4 * ROWS, D), np.float32)
    count = 2 * int(np.prod(list(axes.values())))
    spec = jax.sharding.PartitionSpec
    found = mpmd.plan(
        trained, params, x, devices=count, axes=tuple(axes), schedules=("1f1b",), stages_per_mesh=(1,),
        in_shardings=([spec(None, "model")] * 4 if "model" in axes else None, spec("data")),
        rematerialise=(False,), partition=10,
    )  # fmt: skip
    rank = next(k for k, c in enumerate(found.candidates) if dict(c.choice.axes) == axes)
    assert found.candidates[rank].is_partitioned
    predicted, peaks = peaks_of(found, rank, params, x)
    assert predicted == pytest.approx(peaks, rel=0.05)


def test_a_batch_that_does_not_fit_is_refused():
    """The first mesh holds it whole, and then its slices."""
    rows = jax.ShapeDtypeStruct((16 * ROWS, D), jnp.float32)
    batch = 16 * ROWS * D * 4
    for partition in (0, 1):
        with pytest.raises(ConfigError, match="on each device of m0, mostly"):
            planned(PARAMS, rows, memory=2 * batch, rematerialise=(True,), partition=partition)
    best = planned(PARAMS, rows, memory=4 * batch, rematerialise=(True,), schedules=("1f1b",)).best
    assert best.held[0]["batch"] == 2 * batch


@pytest.mark.slow
def test_a_plan_exchanges_as_often_as_fits():
    rows = jax.sharding.PartitionSpec("data")
    options = {
        "devices": 4, "in_shardings": (rows, rows), "schedules": ("1f1b",), "rematerialise": (False,),
        "stages_per_mesh": (1,), "partition": 9,
    }  # fmt: skip
    free = next(c for c in planned(**options).candidates if c.choice.devices == 2)
    assert free.choice.exchanges == ()
    found = planned(memory=max(free.peak_bytes) - 1, **options)
    rank, less = next((k, c) for k, c in enumerate(found.candidates) if c.choice.devices == 2)
    assert less.choice.exchanges and less.step_s > free.step_s
    assert max(less.peak_bytes) < max(free.peak_bytes)
    params = [np.eye(D, dtype=np.float32)] * LAYERS
    predicted, peaks = peaks_of(found, rank, params, np.ones((ROWS, D), np.float32))
    assert predicted == pytest.approx(peaks, rel=0.05)


@pytest.mark.parametrize("partition", [0, pytest.param(9, marks=pytest.mark.slow)])
def test_what_devices_of_a_mesh_exchange_takes_time(partition):
    """A weight that is split over columns: the gradient of its rows is a sum over devices."""
    spec = jax.sharding.PartitionSpec
    found = planned(
        devices=2, axes=("data", "model"), stages_per_mesh=(1,), schedules=("1f1b",), rematerialise=(False,),
        in_shardings=([spec(None, "model")] * LAYERS, spec("data")), device="H100", partition=partition,
    )  # fmt: skip
    seconds = {c.choice.axes: c.step_s for c in found.candidates}
    tensor, rows = (("data", 1), ("model", 2)), (("data", 2), ("model", 1))
    assert set(seconds) == {tensor, rows, (("data", 1), ("model", 1))}
    assert seconds[tensor] > seconds[rows]  # more bytes, in each microbatch


@pytest.mark.slow
def test_the_best_plan_runs_and_is_measured():
    params = [np.eye(D, dtype=np.float32)] * LAYERS
    x = np.ones((ROWS, D), np.float32)
    found = planned(params, x, microbatches=(2, 4), measure=2)
    assert [c.is_measured for c in found.candidates[:3]] == [True, True, False]
    assert all(c.choice.meshes == 2 for c in found.candidates[:1]) or found.best.choice.meshes == 1
    for rank in range(3):
        got = mpmd.jit(found.step_of(rank), found.config_of(rank))(params, x)
        assert relative_difference(got, jax.jit(found.step_of(rank))(params, x)) < 1e-5


@pytest.mark.slow
def test_predictions_draw_from_what_was_observed(unpoisoned):
    params, x = [np.eye(D, dtype=np.float32)] * LAYERS, np.ones((ROWS, D), np.float32)
    found = planned(params, x)
    with CandidateSteps(found.candidates[:2], found.bind, found.options, (params, x), {}) as steps:
        for _ in range(3):
            steps.measure()
        first, again = steps.predicted(), steps.predicted()
    assert [c.step_s for c in first] == [c.step_s for c in again]
    assert all(c.timeline.makespan_s <= c.step_s < 20 * c.timeline.makespan_s for c in first)


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [1, 2])
def test_a_plan_with_several_devices_for_each_mesh_runs(meshes):
    """The batch is divided over the devices of a mesh, and the gradients are added over them."""
    random = np.random.default_rng(0)
    params = [random.standard_normal((D, D)).astype(np.float32) / 16 for _ in range(LAYERS)]
    x = random.standard_normal((ROWS, D)).astype(np.float32)
    rows = jax.sharding.PartitionSpec("data")
    options = {"in_shardings": (None, rows), "schedules": ("1f1b",), "rematerialise": (False,)}
    found = planned(params, x, devices=4, stages_per_mesh=(1,), **options)
    rank = next(k for k, c in enumerate(found.candidates) if c.choice.meshes == meshes)
    assert found.candidates[rank].choice.devices == 4 // meshes
    got = mpmd.jit(found.step_of(rank), found.config_of(rank))(params, x)
    assert relative_difference(got, jax.jit(found.step_of(rank))(params, x)) < 1e-5
