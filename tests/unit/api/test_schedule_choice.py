"""A schedule that is asked for orders the step, or the user is told why it does not."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import ConfigError, ScheduleError
from mpmd.scheduling.catalogue import SCHEDULES, from_function, get_schedule

W, X = np.eye(4, dtype=np.float32), np.ones((8, 4), np.float32)
V_SHAPED = ("zb_v", "v_half", "v_min", "dualpipe_v")
LOOPED = ("interleaved_1f1b", "interleaved_zb", "looped_bfs", "circular")


def lowered(schedule, meshes=(0, 1), kind="training", **options):
    """A chain of stages on these meshes, as a training step, without microbatches, or without a backward."""
    stages = [mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name=f"s{i}") for i in range(len(meshes))]

    def loss(w, x):
        for stage in stages:
            x = stage(w, x)
        return jnp.mean(x**2)

    def forward(w, x):
        return mpmd.microbatch_loop(lambda c, x: (c + loss(w, x), None), 0.0, x, num_microbatches=4)[0]

    step = {"training": mpmd.accumulate_gradients(loss, 4), "whole": jax.grad(loss), "forward": forward}[kind]
    topology = mpmd.make_topology({f"m{i}": 1 for i in range(max(meshes) + 1)})
    places = {f"s{i}": (f"m{mesh}", i) for i, mesh in enumerate(meshes)}
    options = {"options": mpmd.PipelineOptions(**options)} if options else {}
    config = mpmd.make_config(topology, places, schedule=schedule, **options)
    return mpmd.jit(lambda w, x: step(w, x), config).lower(W, X)


@pytest.mark.parametrize("schedule", V_SHAPED)
def test_what_cannot_be_is_refused_as_by_the_tool(schedule):
    with pytest.raises(ScheduleError) as by_tool:
        get_schedule(schedule).table(num_stages=2, num_meshes=2, num_microbatches=4)
    with pytest.raises(ScheduleError) as by_jit:
        lowered(schedule)
    legend = "\n  stage 0 is s0 on mesh 0, 'm0'\n  stage 1 is s1 on mesh 1, 'm1'"
    assert str(by_jit.value) == str(by_tool.value) + legend
    assert f"schedule {schedule!r} needs two stages per mesh: 4 for 2 meshes, got 2" in str(by_jit.value)
    with pytest.raises(ScheduleError, match="but visits mesh 0 once\\n  stages are on meshes 0, 0, 1, 1"):
        get_schedule(schedule).table(4, 2, 4, (0, 0, 1, 1))


@pytest.mark.parametrize("schedule", LOOPED)
def test_one_stage_per_mesh_leaves_nothing_to_interleave(schedule):
    (warning,) = lowered(schedule).warnings
    assert f"schedule {schedule!r} comes to every mesh several times, but here to each once" in warning
    assert lowered(schedule, (0, 1, 0, 1)).warnings == []


def test_a_v_shaped_schedule_on_another_placement():
    (warning,) = lowered("zb_v", (0, 1, 0, 1)).warnings
    assert "'zb_v' goes down the meshes and up again, but the stages are on meshes 0, 1, 0, 1" in warning
    assert "place them as 0, 1, 1, 0" in warning
    assert lowered("zb_v", (0, 1, 1, 0)).warnings == []


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_v", "dualpipe", "forward_only"])
def test_without_microbatches_there_is_nothing_to_order(schedule):
    found = [w for w in lowered(schedule, kind="whole").warnings if "has nothing to order" in w]
    assert len(found) == 1
    assert f"schedule {schedule!r} has nothing to order: no named computation is in a loop" in found[0]


def test_a_schedule_that_nobody_asked_for_is_not_warned_of():
    assert lowered(None, kind="whole").warnings == []
    assert lowered(None).as_text("program") == lowered("1f1b").as_text("program")


@pytest.mark.parametrize(
    "schedule", ["forward_only", from_function(lambda t: t.microbatch, has_backward=False)]
)
def test_a_schedule_without_backward_for_a_step_with_one(schedule):
    with pytest.raises(ScheduleError, match="orders no backward, but the step has one"):
        lowered(schedule)
    assert not any("schedule" in w for w in lowered(schedule, kind="forward").warnings)


def test_nothing_to_split():
    (warning,) = (w for w in lowered("zb_h1", kind="forward").warnings if "schedule" in w)
    assert "'zb_h1' splits the backward of the stages, but this step has no backward to split" in warning


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "dualpipe"])
def test_a_stage_that_only_the_last_microbatch_needs(schedule):
    first, last = (mpmd.named_computation(jnp.tanh, name=name) for name in ("first", "last"))

    def body(carried, x):
        h = first(x)
        return first(last(h)), first(h)

    step = lambda x: mpmd.microbatch_loop(body, jnp.ones((2, 4)), x, num_microbatches=4)  # noqa: E731
    places = {"first": ("m1", 0), "last": ("m0", 1)}
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), places, schedule=schedule)
    found = mpmd.jit(step, config).lower(X)
    assert "last" in found.as_text("program")
    assert not any("nothing of it runs" in w for w in found.warnings)


def two_loops(schedule, counts, places):
    """A step with two loops that do not wait for each other, with so many microbatches."""
    stages = [mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name=name) for name in places]

    def loss(w, x):
        for stage in stages:
            x = stage(w, x)
        return jnp.mean(x**2)

    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), places, schedule=schedule)
    step = lambda w, *xs: [mpmd.accumulate_gradients(loss, n)(w, x) for n, x in zip(counts, xs)]  # noqa: E731
    return mpmd.jit(step, config).lower(W, *(jnp.ones((4 * n, 4)) for n in counts))


@pytest.mark.parametrize("counts", [(2, 4), (1, 3), (3, 1), (1, 1)])
def test_both_loops_have_second_copies_in_their_second_half(counts):
    found = two_loops("dualpipe", counts, {"s0": ("m0", 0), "s1": ("m1", 1)})
    assert not any("the order" in text for text in (*found.notices, *found.warnings))


def test_what_cannot_have_second_copies_is_named():
    with pytest.raises(ScheduleError, match="comes to every mesh once") as error:
        two_loops("dualpipe", (2, 2), {"a": ("m0", 0), "b": ("m1", 1), "c": ("m0", 7)})
    assert str(error.value).endswith(
        "stage 0 is a on mesh 0, 'm0'\n  stage 1 is b on mesh 1, 'm1'\n  stage 2 is c on mesh 0, 'm0'"
    )


def test_second_copies_where_a_loop_has_not_all_stages():
    first, last = (mpmd.named_computation(jnp.tanh, name=name) for name in ("first", "last"))
    body = lambda total, x: (total + last(x).sum(), None)  # noqa: E731
    step = lambda x: (first(x), mpmd.microbatch_loop(body, 0.0, x, num_microbatches=4)[0])  # noqa: E731
    places = {"first": ("m0", 0), "last": ("m1", 1)}
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), places, schedule="dualpipe")
    assert not any("the order" in text for text in mpmd.jit(step, config).lower(X).notices)


def test_second_copies_where_nothing_uses_the_first_half_of_a_loop():
    """Each microbatch replaces what is carried: only the last one counts, and it runs on second copies."""
    stage = mpmd.named_computation(jnp.tanh, name="stage")
    last = mpmd.named_computation(jnp.cos, name="last")
    body = lambda _, x: (last(stage(x)), None)  # noqa: E731
    step = lambda x: mpmd.microbatch_loop(body, X[:2], x, num_microbatches=4)[0]  # noqa: E731
    places = {"stage": ("m0", 0), "last": ("m1", 1)}
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), places, schedule="dualpipe")
    found = mpmd.jit(step, config).lower(X)
    assert "stage_mirror" in found.as_text("program")
    assert not any("the order" in text for text in found.notices)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
@pytest.mark.parametrize("others", [{}, {"s1": ("m0", 3)}])
def test_a_name_without_a_stage_on_a_mesh_whose_position_is_the_stage_of_another_mesh(schedule, others):
    """It is a stage of its mesh: that which the mesh has, or a new one."""
    places = {"s0": ("m1", 0), **others, "last": "m0"}
    stages = [mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name=name) for name in places]

    def loss(w, x):
        for stage in stages:
            x = stage(w, x)
        return jnp.mean(x**2)

    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), places, schedule=schedule)
    found = mpmd.jit(mpmd.accumulate_gradients(loss, 4), config).lower(W, X)
    assert not any("the order" in text for text in (*found.notices, *found.warnings))
    of_m1 = found.as_text("schedule").splitlines()[2]
    assert of_m1.startswith("m1") and of_m1.index("F1 ") < of_m1.index("B0 ")


def test_remarks_do_not_use_the_notation_of_the_passes():
    """Second copies are called so, and unnamed work is without the names of functions and passes."""
    stage, last = (mpmd.named_computation(jnp.tanh, name=name) for name in ("stage", "last"))

    def body(total, x):
        h = stage(last(stage(x)))
        return total + (h * x).sum(), None

    step = lambda x: mpmd.microbatch_loop(body, 0.0, x, num_microbatches=4)[0]  # noqa: E731
    places = {"stage": ("m0", 0), "last": ("m1", 1)}
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), places, schedule="dualpipe")
    found = mpmd.jit(step, config).lower(X)
    text = "\n".join((*found.notices, *found.warnings))
    assert '"stage, second copy" on mesh' in text
    assert "_mirror" not in text and "infer_mesh" not in text and "@" not in text


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_schedule": "GPipe"},
        {"task_orders": "m0:0F0"},
        {"schedule_rules": ("FragmentScheduleRule()",)},
    ],
)
def test_two_orders_at_once(options):
    (option,) = options
    with pytest.raises(ConfigError, match=f"the schedule 'gpipe' and the option {option} both say in which"):
        lowered("gpipe", **options)


def test_the_order_of_an_option_is_used():
    gpipe = lowered(None, pipeline_schedule="GPipe")
    assert (
        gpipe.as_text("schedule") == lowered("gpipe").as_text("schedule") != lowered(None).as_text("schedule")
    )
    tasks = ",".join(f"0{phase}{i}" for phase in "FB" for i in range(4))
    first = lowered(None, task_orders=f"m0:{tasks}").as_text("schedule").splitlines()[1]
    assert first.index("F3") < first.index("B0")


def test_each_warning_of_lowering_is_a_python_warning_once():
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        found = lowered("looped_bfs")
    assert [str(w.message) for w in issued] == found.warnings != []
    assert all(w.filename == __file__ for w in issued)


def test_every_schedule_is_looked_at():
    """Here or where all schedules run, `tests/differential/test_schedules.py`."""
    known = {
        *V_SHAPED, *LOOPED, "gpipe", "1f1b", "eager_1f1b", "combined_1f1b", "zb_h1", "zb_h2", "dualpipe",
        "forward_only",
    }  # fmt: skip
    assert set(SCHEDULES) == known
