"""Models with several inputs or heads: towers run side by side, and nothing is sent back to frozen ones."""

from __future__ import annotations

import jax
import pytest

import mpmd
from examples.workloads import branches
from examples.workloads.branches import further_tokens, two_encoders, vision_language
from mpmd.scheduling import SCHEDULES
from mpmd.scheduling.timeline import Timeline
from tests.support.comparing import relative_difference
from tests.support.evaluate_mpmd import evaluate

pytestmark = pytest.mark.usefixtures("plain_xla")

MICROBATCHES = 4
V_SHAPED = ("zb_v", "v_half", "v_min", "dualpipe_v")

PATTERNS = {
    "two_encoders": mpmd.by_parameters(r"vision/(\d+)", r"text/(\d+)"),
    "vision_language": mpmd.by_parameters(r"vision/(\d+)", r"layers/(\d+)"),
    "encoder_decoder": mpmd.by_parameters(r"encoder/(\d+)", r"decoder/(\d+)"),
    "further_tokens": mpmd.by_parameters(r"layers/(\d+)", lengths=[1, 1, 1], over=["m0", "m1", "m2"]),
}


def meshes(count):
    return mpmd.make_topology({f"m{m}": 1 for m in range(count)})


def step_of(loss):
    return lambda params, *batch: mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)


def lowered_of(model, **request):
    """The lowered step of a model on four meshes, or those of the request."""
    params, loss, batch = model
    topology = meshes(request.pop("meshes", 4))
    return mpmd.jit(step_of(loss), mpmd.make_config(topology, **request)).lower(params, *batch)


def difference(lowered, model):
    """From `jax.jit`, in loss and gradients."""
    params, loss, batch = model
    want = jax.tree.leaves(jax.jit(step_of(loss))(params, *batch))
    got = evaluate(lowered.partitioned.module, jax.tree.leaves((params, *batch)))
    return relative_difference(got, want)


def spans(timeline: Timeline, mesh: str, phase: str):
    """(start, end) of the tasks of a phase on a mesh, in order of the microbatches."""
    tasks = [s for s in timeline.compute(mesh) if s.task is not None and s.task.phase.value == phase]
    return [(s.start_s, s.end_s) for s in sorted(tasks, key=lambda s: s.task.microbatch)]


def overlap(one, other):
    return max(one[0], other[0]) < min(one[1], other[1])


@pytest.mark.fast_cases("patterns-encoder_decoder")  # below are the others
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("stages", ["patterns", "auto"])
def test_it_computes_what_jax_does(name, stages):
    model = getattr(branches, name)()
    chosen = PATTERNS[name] if stages == "patterns" else stages
    lowered = lowered_of(model, meshes=3 if name == "further_tokens" else 4, stages=chosen)
    assert difference(lowered, model) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_two_towers(schedule):
    """Those that know no branches take the stages for a chain; some need two on a mesh."""
    if schedule == "forward_only":
        pytest.skip("the step has a backward")
    if SCHEDULES[schedule]().placement(4, 2) == (0, 0, 1, 1):
        request = {"meshes": 4, "stages": PATTERNS["two_encoders"]}
    else:
        over = [f"m{m}" for m in ((0, 1, 1, 0) if schedule in V_SHAPED else (0, 1, 0, 1))]
        stages = mpmd.by_parameters(r"vision/(\d+)", r"text/(\d+)", over=over)
        request = {"meshes": 2, "stages": stages}
    model = two_encoders()
    assert difference(lowered_of(model, schedule=schedule, **request), model) < 1e-5


def named_towers(params, images, texts):
    """Two towers by names, on meshes of their own, and a third for what joins them."""

    def tower(layers, x):
        for w in layers:
            x = jax.numpy.tanh(x @ w)
        return x

    image = mpmd.named_computation(tower, name="vision")(params["vision"], images)
    words = params["words"][texts].mean(1)
    text = mpmd.named_computation(tower, name="text")(params["text"], words)
    return mpmd.named_computation(lambda a, b: ((a @ b.T) ** 2).mean(), name="joint")(image, text)


@pytest.mark.parametrize("by", ["names", "patterns"])
def test_towers_run_side_by_side(by):
    """Forward and backward of both overlap, and each runs ahead by the meshes that follow it alone."""
    params, loss, batch = two_encoders()
    if by == "names":
        model, request = (params, named_towers, batch), {"meshes": 3}
        request["assignment"] = {"vision": "m0", "text": "m1", "joint": "m2"}
        ahead = {"m0": 2, "m1": 2}
    else:
        model, request = (params, loss, batch), {"stages": PATTERNS["two_encoders"]}
        ahead = {"m0": 3, "m1": 2, "m2": 2}  # m0 → m1 → m3, and m2 → m3
    lowered = lowered_of(model, **request)
    assert difference(lowered, model) < 1e-5
    timeline = lowered.schedule()
    vision, text = ("m0", "m1") if by == "names" else ("m0", "m2")
    assert overlap(spans(timeline, vision, "F")[0], spans(timeline, text, "F")[0])
    last_of_vision = "m0" if by == "names" else "m1"
    for one, other in zip(spans(timeline, last_of_vision, "B"), spans(timeline, text, "B"), strict=True):
        assert overlap(one, other)
    held = {memory.mesh: memory.peak_activations for memory in timeline.memory}
    assert {mesh: held[mesh] for mesh in ahead} == ahead


@pytest.mark.fast_cases("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_frozen_tower_has_no_backward_and_gets_no_gradient(schedule):
    model = vision_language(frozen=True)
    lowered = lowered_of(model, stages=PATTERNS["vision_language"], schedule=schedule)
    assert difference(lowered, model) < 1e-5
    timeline = lowered.schedule()
    assert [len(spans(timeline, mesh, "F")) for mesh in ("m0", "m1")] == [MICROBATCHES] * 2
    for mesh in ("m0", "m1"):
        assert not any(spans(timeline, mesh, phase) for phase in "BIW")
    assert {s.mesh for s in timeline.transfers if s.peer in ("m0", "m1")} == {"m0"}
    assert len(spans(timeline, "m2", "B")) == MICROBATCHES  # nothing waits for half of it


def test_the_end_of_a_tower_does_not_move_to_another():
    """Fewer bytes cross before its last operation than after it: this moves to what reads the tower."""
    params, _, batch = two_encoders()

    def loss(p, images, texts):
        image, text = images, p["words"][texts].mean(1)
        for w in p["vision"]:
            image = jax.numpy.tanh(image @ w)
        image = image[:, :2].repeat(12, 1)
        for w in p["text"]:
            text = jax.numpy.tanh(text @ w)
        return jax.numpy.concatenate([image, text], 1).std() * p["scale"]

    text = lowered_of((params, loss, batch), stages=PATTERNS["two_encoders"]).as_text("stages")
    assert "sends f32[2,2] (16 B) of slice" in text
    sent = next(line for line in text.splitlines() if "of slice" in line)
    assert sent.endswith("to stage3")


def test_what_each_decoder_layer_computes_from_the_encoder_is_not_sent():
    """The transposes of its values are computed where they are read."""
    lowered = lowered_of(branches.encoder_decoder(), stages=PATTERNS["encoder_decoder"])
    text = lowered.as_text("stages")
    sends = [line.split(" of ")[1].split(" (")[0] for line in text.splitlines() if "sends" in line]
    assert sends == ["add", "add", "add", "neg"] and "transpose" not in text


@pytest.mark.parametrize("in_turns", [False, True])
def test_auto_gives_each_tower_stages_of_its_own(in_turns):
    """Also where the program computes a layer of each in turns."""
    text = lowered_of(two_encoders(4, in_turns), meshes=2, stages="auto").as_text("stages")
    first, second = text.split("stage1 on m1")[:2]
    assert "vision/3" in first and "text/" not in first
    assert "text/3" in second.split("work of")[0] and "vision/" not in second.split("work of")[0]


@pytest.mark.slow
def test_auto_prices_a_frozen_tower_without_a_backward():
    """A third of its work: the tower of twelve layers, and as many layers as it can."""

    def estimated(frozen):
        params, loss, batch = two_encoders(6)

        def stopped(p, *batch):
            return loss({**p, "vision": jax.lax.stop_gradient(p["vision"])}, *batch)

        text = lowered_of((params, stopped if frozen else loss, batch), meshes=2, stages="auto")
        first = text.as_text("stages").split("stage1 on m1")[0]
        return sum(f" {kind}/{k}" in first for kind in ("vision", "text") for k in range(6))

    assert estimated(True) > estimated(False) == 6


def test_heads_for_further_tokens_share_the_embedding_and_the_head():
    """On the last stage; the gradient of the embedding crosses to the first once a step."""
    model = further_tokens()
    lowered = lowered_of(
        model, meshes=3, stages=mpmd.by_parameters(r"layers/(\d+)", last="further|norm|head")
    )
    last = lowered.as_text("stages").split("stage2 on m2")[1]
    assert "further/0/join" in last and "further/1/join" in last
    assert "words (also read in stage0" in last
    params = model[0]
    timeline = lowered.schedule()
    back = [s for s in timeline.transfers if s.peer == "m0" and s.nbytes == params["words"].nbytes]
    assert len(back) == 1 and back[0].mesh == "m2"
