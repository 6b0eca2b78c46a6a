"""What devices of a stage hold of a sum is added once for all microbatches, and trains as under `jax.jit`."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from examples.workloads.collectives import collectives
from examples.workloads.models import MODELS, D, named, normal, square
from examples.workloads.steps import sgd_momentum, training_step
from mpmd.runtime.program.streams import Run
from tests.support.comparing import check_training, copied, relative_difference
from tests.support.sharded_models import SHARDED_MODELS, shardings

pytestmark = pytest.mark.usefixtures("plain_xla")

SCHEDULES = {"1f1b": 2, "zb_h1": 2, "interleaved_1f1b": 4}
"""The number of stages, on two meshes."""

MICROBATCHES = 4
DATA = {"data": 2}


def on_two_meshes(step, stages, schedule="1f1b", axes=None, in_shardings=None, **options):
    """`step` with stage `s` on mesh `s % 2`."""
    topology = mpmd.make_topology({"m0": axes or DATA, "m1": axes or DATA})
    config = mpmd.make_config(
        topology,
        {f"stage{s}": f"m{s % 2}" for s in range(stages)},
        schedule=schedule,
        in_shardings=in_shardings,
        options=mpmd.PipelineOptions(**options),
    )
    return mpmd.jit(step, config)


def exchanges(jitted, *arguments, along=((0, 1),)):
    """The collectives of a step by kind: in programs of microbatches, and in others.

    Args:
        jitted: the step.
        arguments: its arguments.
        along: the groups of devices that exchange.
    """
    compiled = jitted.compiled(*arguments)
    found = Counter(), Counter()
    for stream in compiled.program.streams:
        for op in stream.instructions:
            if isinstance(op, Run):
                of_program = collectives(compiled.executables[op.executable].as_text("hlo"), 2)
                kinds = [c.kind for c in of_program if {tuple(sorted(g)) for g in c.groups} == set(along)]
                found[op.microbatch is None].update(kinds)
    return found


def check(
    step, state, batch, schedule="1f1b", stages=2, axes=None, in_shardings=None, tolerance=1e-5, **options
):
    """Training equals that of `jax.jit`, and that with a reduction per microbatch."""
    given = (None, *(P("data") for _ in batch)) if in_shardings is None else in_shardings
    once, each = (
        on_two_meshes(step, stages, schedule, axes, given, reduce_gradients=way, **options)
        for way in ("once", "per_microbatch")
    )
    check_training(once, jax.jit(step), state, batch, tolerance)
    assert relative_difference(once(copied(state), *batch), each(copied(state), *batch)) <= tolerance
    return once, each


FAST = {("mlp", "zb_h1")}

EXCHANGE = {
    "dropout": "the key is in the first row of the batch",
    "custom_gradient": "a branch is not linear",
}
"""Models that exchange in each microbatch, whatever becomes of gradients."""


@pytest.mark.parametrize(
    ("name", "schedule"),
    [pytest.param(n, s, marks=[] if (n, s) in FAST else pytest.mark.slow) for n in MODELS for s in SCHEDULES],
)
def test_gradients_are_reduced_once(name, schedule):
    model, stages = MODELS[name], SCHEDULES[schedule]
    params, loss, batch = model.build(stages)
    init, update = sgd_momentum()
    state = init(params)
    once, each = check(
        training_step(loss, MICROBATCHES, update), state, batch, schedule, stages, tolerance=model.tolerance
    )
    of_microbatches, others = exchanges(once, state, *batch)
    before, _ = exchanges(each, state, *batch)
    if name not in EXCHANGE:
        assert of_microbatches.total() == 0
        assert others["all-reduce"] > 0
    assert of_microbatches.total() <= before.total()
    assert before["all-reduce"] > 0


def test_all_microbatches_are_one_program():
    """Their first one reuses the memory of its start values too, which are equal for equal weights."""

    def twice(p, x):
        return jnp.tanh(x @ p[0]) @ p[1]

    def loss(params, x, y):
        return square(named(twice, 1)(params[1], named(twice, 0)(params[0], x)), y)

    params = [[normal(s, D, D), normal(s + 2, D, D)] for s in range(2)]
    init, update = sgd_momentum()
    step = training_step(loss, MICROBATCHES, update)
    batch = normal(7, 8, D), normal(8, 8, D)
    lowered = on_two_meshes(step, 2, in_shardings=(None, P("data"), P("data"))).lower(init(params), *batch)
    of_microbatches = [name for name in lowered.fragments if "_call" in name]
    assert len(of_microbatches) == 3
    assert all(f"calls0to{MICROBATCHES - 1}" in name for name in of_microbatches)


@pytest.mark.slow
def test_a_stage_reduces_while_others_compute():
    """One of two stages of a mesh is done early: it reduces where the mesh would wait."""
    model, stages = MODELS["mlp"], SCHEDULES["interleaved_1f1b"]
    params, loss, batch = model.build(stages)
    init, update = sgd_momentum()
    step = training_step(loss, MICROBATCHES, update)
    given = (None, *(P("data") for _ in batch))
    lowered = on_two_meshes(step, stages, "interleaved_1f1b", None, given).lower(init(params), *batch)
    last = [op for op in lowered.program.streams[1].instructions if isinstance(op, Run)]
    names = [op.executable.partition("_")[2].partition(".")[0].partition("_calls")[0] for op in last]
    first, second = (i for i, name in enumerate(names) if name == "reduce")
    assert names[first - 1] == "stage3_fwd_bwd"
    assert names[first + 1 : second] == ["stage1_bwd", "stage1_bwd"]
    timeline = lowered.schedule()
    others = [span for span in timeline.compute("m0") if span.task is not None]
    reduction = next(span for span in timeline.compute("m1") if "_reduce" in span.name)
    assert any(span.start_s < reduction.end_s and reduction.start_s < span.end_s for span in others)
    chart = lowered.as_text("schedule")
    assert chart.count("r" * 5) >= 2 or chart.count("reduce") >= 2


@pytest.mark.parametrize("alike", [True, False])
def test_meshes_that_differ_reduce_in_each_microbatch_and_say_so(alike):
    params, loss, batch = MODELS["mlp"].build(2)
    init, update = sgd_momentum()
    topology = mpmd.make_topology({"m0": {"data": 2}, "m1": {"data": 2 if alike else 4}})
    config = mpmd.make_config(
        topology, {"stage0": "m0", "stage1": "m1"}, in_shardings=(None, P("data"), P("data"))
    )
    lowered = mpmd.jit(training_step(loss, MICROBATCHES, update), config).lower(init(params), *batch)
    assert any("have different axes" in notice for notice in lowered.notices) == (not alike)
    assert any("_reduce." in name for name in lowered.fragments) == alike


MESHES = {
    "data": (DATA, ((0, 1),)),
    "data and model": ({"data": 2, "model": 2}, ((0, 2), (1, 3))),
    "four": ({"data": 4}, ((0, 1, 2, 3),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SHARDED_MODELS)
def test_gradients_of_split_models_are_reduced_once(name, mesh, schedule):
    model, (axes, along) = SHARDED_MODELS[name](), MESHES[mesh]
    init, update = sgd_momentum()
    state, step = init(model.params), training_step(model.loss, 2, update)
    split = shardings(model, axes)["in_shardings"]
    once, each = check(step, state, model.batch, schedule, axes=axes, in_shardings=split)
    of_microbatches, others = exchanges(once, state, *model.batch, along=along)
    assert of_microbatches.total() == 0
    assert others["all-reduce"] > 0
    assert exchanges(each, state, *model.batch, along=along)[0]["all-reduce"] > 0


def accumulated(loss, change, dtype=None):
    """`step(state, *batch)` with the user's own loop over microbatches, in which gradients are changed."""
    init, update = sgd_momentum()

    def step(state, *batch):
        def one(totals, rows):
            value, grads = jax.value_and_grad(loss)(state[0], *rows)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), totals, (value, change(grads))), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype or p.dtype), state[0])
        (value, total), _ = jax.lax.scan(one, (jnp.float32(0), zeros), batch)
        return update(state, total), value

    return init, step


def in_microbatches(batch):
    """Microbatches along dim 0, and how they are split: a split dim 0 of all rows would be gathered."""
    given = (None, *(P(None, "data") for _ in batch))
    return jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch), given


def clipped(grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)


def finite(grads):
    ok = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    return jax.tree.map(lambda g: jnp.where(ok, g, jnp.zeros_like(g)), grads)


NOT_LINEAR = {
    "clipped by norm": clipped,
    "clipped by value": lambda grads: jax.tree.map(lambda g: jnp.clip(g, -0.01, 0.01), grads),
    "finite": finite,
    "rounded": lambda grads: jax.tree.map(lambda g: jnp.round(g * 64) / 64, grads),
    "sign": lambda grads: jax.tree.map(jnp.sign, grads),
    "squared": lambda grads: jax.tree.map(jnp.square, grads),
}
LINEAR = {
    "as it is": lambda grads: grads,
    "scaled": lambda grads: jax.tree.map(lambda g: 3 * g / 7, grads),
    "negated": lambda grads: jax.tree.map(jnp.negative, grads),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", NOT_LINEAR)
def test_what_is_not_linear_is_reduced_in_each_microbatch(change):
    params, loss, batch = MODELS["mlp"].build(2)
    init, step = accumulated(loss, NOT_LINEAR[change])
    state = init(params)
    batch, given = in_microbatches(batch)
    tolerance = 1e-2 if change in ("sign", "rounded") else 1e-5
    once, _ = check(step, state, batch, in_shardings=given, tolerance=tolerance)
    assert exchanges(once, state, *batch)[0]["all-reduce"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("change", LINEAR)
def test_what_is_linear_is_reduced_once(change):
    params, loss, batch = MODELS["mlp"].build(2)
    init, step = accumulated(loss, LINEAR[change])
    state = init(params)
    batch, given = in_microbatches(batch)
    once, each = check(step, state, batch, in_shardings=given)
    assert exchanges(each, state, *batch)[0]["all-reduce"] > 0
    assert exchanges(once, state, *batch)[0].total() == 0


@pytest.mark.slow
def test_half_precision_gradients_are_accumulated_in_single_precision():
    params, loss, batch = MODELS["half_precision"].build(2)
    init, step = accumulated(loss, lambda grads: grads, dtype=jnp.float32)
    state = jax.tree.map(jnp.zeros_like, init(params)[1])
    state = params, jax.tree.map(lambda v: v.astype(jnp.float32), state)
    batch, given = in_microbatches(batch)
    once, _ = check(step, state, batch, in_shardings=given, tolerance=3e-2)
    assert exchanges(once, state, *batch)[0].total() == 0


@pytest.mark.slow
def test_steps_that_are_skipped_with_a_scaled_loss():
    params, loss, batch = MODELS["mlp"].build(2)
    init, update = sgd_momentum()

    def step(state, scale, *batch):
        value, grads = mpmd.accumulate_gradients(
            lambda p, *rows: loss(p, *rows) * scale,
            MICROBATCHES,
        )(state[0], *batch)
        ok = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        new = update(state, jax.tree.map(lambda g: g / scale, grads))
        return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state), (ok, value)

    state = init(params)
    given = (None, None, *(P("data") for _ in batch))
    once = on_two_meshes(step, 2, in_shardings=given)
    for scale in (np.float32(1024), np.float32(np.inf)):
        want, got = jax.jit(step)(state, scale, *batch), once(copied(state), scale, *batch)
        assert bool(got[1][0]) == bool(want[1][0]) == np.isfinite(scale)
        assert relative_difference(got[0], want[0]) <= 1e-5
    assert exchanges(once, state, scale, *batch)[0].total() == 0


@pytest.mark.slow
def test_several_steps_per_update():
    params, loss, batch = MODELS["mlp"].build(2)
    optimizer = optax.MultiSteps(optax.adamw(1e-2, eps=1e-3), every_k_schedule=2)

    def update(state, grads):
        updates, inner = optimizer.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), inner

    state = jax.tree.map(np.asarray, (params, optimizer.init(jax.tree.map(jnp.asarray, params))))
    once, _ = check(training_step(loss, MICROBATCHES, update), state, batch, tolerance=2e-5)
    assert exchanges(once, state, *batch)[0].total() == 0


@pytest.mark.slow
def test_every_microbatch_arrives():
    """Gradients of microbatches are powers of two: each sum of some of them is another number."""
    rows, width = 8, 4
    batch = (np.repeat(2.0 ** np.arange(rows), width).reshape(rows, width).astype(np.float32),)
    params = {f"s{s}": np.ones((width,), np.float32) for s in range(2)}

    def loss(params, x):
        x = named(lambda p, x: x * p, 0)(params["s0"], x)
        return named(lambda p, x: (x * p).sum(), 1)(params["s1"], x)

    init, step = accumulated(loss, lambda grads: grads)
    state = init(params)
    batch, given = in_microbatches(batch)
    once = on_two_meshes(step, 2, in_shardings=given)
    (_, velocity), _ = once(copied(state), *batch)
    for s in range(2):
        np.testing.assert_array_equal(velocity[f"s{s}"], np.full(width, 2.0**rows - 1))
    assert exchanges(once, state, *batch)[0].total() == 0


def table(rows_of_table):
    """An embedding, and a head; the gradient of the table is a scatter."""
    params = {"table": normal(0, 12, D), "head": normal(1, D, D)}

    def loss(params, tokens, y):
        x = named(lambda t, tokens: t[tokens], 0)(params["table"], tokens)
        return named(lambda h, x, y: square(jnp.tanh(x @ h), y), 1)(params["head"], x, y)

    tokens = np.random.default_rng(0).integers(0, 12, 16)
    specs = {"table": rows_of_table, "head": None}
    return params, loss, (tokens, normal(2, 16, D)), ((specs, specs), P("data"), P("data"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "spec",
    [
        None,
        P("data"),
        P(None, "data"),
        P("model"),
        P(("data", "model")),
        P(("model", "data")),
        P("model", "data"),
    ],
)
def test_a_table_whose_gradient_is_a_scatter(spec, schedule):
    axes = {"data": 2, "model": 2} if "model" in str(spec) else DATA
    params, loss, batch, given = table(spec)
    init, update = sgd_momentum()
    check(
        training_step(loss, MICROBATCHES, update),
        init(params),
        batch,
        schedule,
        axes=axes,
        in_shardings=given,
    )


def fsdp(params):
    """Each weight split along its largest dim."""

    def spec(leaf):
        largest = int(np.argmax(leaf.shape))
        return P(*("data" if d == largest else None for d in range(leaf.ndim)))

    return jax.tree.map(spec, params)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["once", "per_use"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "transformer", "mixture", "scanned_layers", "tied", "checkpointed"])
def test_weights_that_lie_split_are_gathered(name, schedule, gather):
    model, stages = MODELS[name], SCHEDULES[schedule]
    params, loss, batch = model.build(stages)
    init, update = sgd_momentum()
    state, spec = init(params), fsdp(params)
    given = ((spec, spec), *(P("data") for _ in batch))
    once, _ = check(
        training_step(loss, MICROBATCHES, update), state, batch, schedule, stages,
        in_shardings=given, tolerance=model.tolerance, gather_weights=gather,
    )  # fmt: skip
    of_microbatches, others = exchanges(once, state, *batch)
    if gather == "per_use":
        assert others["all-gather"] == 0
    else:
        assert others["all-gather"] > 0
        assert of_microbatches.total() == 0


def in_bf16(params, x):
    """Layers whose weights are masters in f32."""
    for w in params:
        x = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return x


def scanned(layers):
    def run(params, x):
        return jax.lax.scan(lambda x, w: (layers([w], x), None), x.astype(jnp.bfloat16), params)[0]

    return run


LAYERS_IN_BF16 = {
    "separate": in_bf16,
    "rematerialised": jax.checkpoint(in_bf16),
    "scanned": scanned(in_bf16),
    "scanned, rematerialised": scanned(jax.checkpoint(in_bf16)),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "native"])
@pytest.mark.parametrize("way", LAYERS_IN_BF16)
def test_masters_are_gathered_as_they_are_used(way, backend):
    """Half of the bytes of the same weights in f32; XLA exchanges f32 on CPUs."""
    params = {f"s{s}": np.stack([normal(2 * s + k, D, D) for k in range(2)]) for s in range(2)}
    batch = normal(7, 8, D), normal(8, 8, D)
    init, update = sgd_momentum()
    state, spec = init(params), jax.tree.map(lambda _: P(None, "data"), params)

    def loss(params, x, y):
        x = named(LAYERS_IN_BF16[way], 0)(params["s0"], x)
        return named(lambda p, x, y: square(LAYERS_IN_BF16[way](p, x), y), 1)(params["s1"], x, y)

    once, _ = check(
        training_step(loss, MICROBATCHES, update), state, batch,
        in_shardings=((spec, spec), P("data"), P("data")), tolerance=3e-2,
        gather_weights="once", backend=backend,
    )  # fmt: skip
    compiled = once.compiled(state, *batch)
    texts = [executable.as_text("hlo") for executable in compiled.executables.values()]
    gathers = [c.size for text in texts for c in collectives(text, 2) if c.kind == "all-gather"]
    share = 1 if backend == "xla" else 2
    assert sum(gathers) == sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // share
    assert exchanges(once, state, *batch)[0].total() == 0
