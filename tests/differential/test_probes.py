"""Steps that other pipeline libraries refuse or get wrong; each gives `jax.jit`'s numbers here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from examples.workloads.models import (
    MODELS,
    D,
    chain,
    dense,
    dense_params,
    mlp,
    named,
    normal,
    square,
)
from examples.workloads.steps import pipelined
from mpmd.runtime.program.streams import Run
from tests.support.comparing import messages, messages_by_route, relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

STAGES = 3
PARAMS, LOSS, BATCH = mlp(STAGES)


def check(step, *args, stages=STAGES, tolerance=1e-5, **options):
    """Runs a step both ways; gives the jitted step for a look at its program."""
    jitted = pipelined(step, stages, **options)
    assert relative_difference(jitted(*args), jax.jit(step)(*args)) <= tolerance
    return jitted


def program(jitted, *args):
    return jitted.compiled(*args).program


@pytest.mark.slow
def test_global_norm_clipping_as_a_sum_over_all_gradients():
    def step(params, *batch):
        loss, grads = mpmd.accumulate_gradients(LOSS, 2)(params, *batch)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.01 / norm), grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, clipped), loss, norm

    jitted = check(step, PARAMS, *BATCH)
    scalars = [t for c in program(jitted, PARAMS, *BATCH).channels for t in c.types if t.shape == ()]
    assert len(scalars) == STAGES * (STAGES - 1), "every mesh sends its part to every other one, once"


def loss_with_metric(params, x, y):
    """The largest activation of the middle stage, beside the loss."""
    x = named(dense, 0)(params["s0"], x)
    x, largest = named(lambda p, x: (dense(p, x), jnp.abs(dense(p, x)).max()), 1)(params["s1"], x)
    return named(lambda p, x, y: square(dense(p, x), y), 2)(params["s2"], x, y), largest


@pytest.mark.slow
def test_a_metric_of_a_middle_stage_reduced_with_max():
    def step(params, x, y):
        def body(carry, x, y):
            total, largest = carry
            (loss, metric), grads = jax.value_and_grad(loss_with_metric, has_aux=True)(params, x, y)
            return (jax.tree.map(jnp.add, total, (loss, grads)), jnp.maximum(largest, metric)), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (total, largest), _ = mpmd.microbatch_loop(body, (zeros, -jnp.inf), x, y, num_microbatches=4)
        return jax.tree.map(lambda t: t / 4, total), largest

    jitted = check(step, PARAMS, *BATCH)
    assert messages(program(jitted, PARAMS, *BATCH)) == 2 * (STAGES - 1) * 4


@pytest.mark.slow
def test_a_metric_for_each_microbatch():
    def step(params, *batch):
        return mpmd.accumulate_gradients(loss_with_metric, 4, has_aux=True)(params, *batch)

    check(step, PARAMS, *BATCH)


def test_microbatched_evaluation():
    def evaluate(params, *batch):
        def body(total, x, y):
            loss = LOSS(params, x, y)
            return total + loss, loss

        return mpmd.microbatch_loop(body, jnp.float32(0), *batch, num_microbatches=4)

    jitted = check(evaluate, PARAMS, *BATCH)
    assert messages(program(jitted, PARAMS, *BATCH)) == (STAGES - 1) * 4


def test_a_step_that_returns_only_the_loss():
    def step(params, *batch):
        return mpmd.accumulate_gradients(LOSS, 4)(params, *batch)[0]

    jitted = check(step, PARAMS, *BATCH)
    assert messages(program(jitted, PARAMS, *BATCH)) == (STAGES - 1) * 4, "there is no backward pass"


def test_no_loop_at_all():
    jitted = check(LOSS, PARAMS, *BATCH)
    assert messages(program(jitted, PARAMS, *BATCH)) == STAGES - 1


@pytest.mark.slow
def test_gradients_without_a_loop():
    check(jax.value_and_grad(LOSS), PARAMS, *BATCH)


def test_two_loops_in_one_step():
    """A training loop, and an evaluation of the new parameters on another batch."""

    def step(params, train, test):
        loss, grads = mpmd.accumulate_gradients(LOSS, 2)(params, *train)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        after, _ = mpmd.microbatch_loop(
            lambda total, x, y: (total + LOSS(new, x, y), None), jnp.float32(0), *test, num_microbatches=4
        )
        return new, loss, after / 4

    test = normal(17, 4, D, scale=1.0), normal(18, 4, D, scale=1.0)
    check(step, PARAMS, BATCH, test)


def test_parameters_that_every_microbatch_updates():
    """The next forward pass needs the last backward pass: nothing overlaps, and nothing is wrong."""

    def step(params, *batch):
        def body(params, x, y):
            loss, grads = jax.value_and_grad(LOSS)(params, x, y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        return mpmd.microbatch_loop(body, params, *batch, num_microbatches=2)

    check(step, PARAMS, *BATCH)


def test_a_value_that_goes_from_the_last_stage_to_the_first_of_the_next_microbatch():
    """Forward passes cannot overlap then; the order of the schedule still holds."""

    def step(params, *batch):
        def loss(params, carry, x, y):
            x = named(dense, 0)(params["s0"], x + carry)
            x = named(dense, 1)(params["s1"], x)
            return named(lambda p, x, y: (square(dense(p, x), y), x), 2)(params["s2"], x, y)

        def body(carry, x, y):
            state, total = carry
            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x, y)
            return (state, jax.tree.map(jnp.add, total, grads)), value

        zeros = (jnp.zeros((2, D)), jax.tree.map(jnp.zeros_like, params))
        return mpmd.microbatch_loop(body, zeros, *batch, num_microbatches=4)

    check(step, PARAMS, *BATCH)


@pytest.mark.slow
def test_a_constant_auxiliary_output():
    def loss(params, x, y):
        return LOSS(params, x, y), {"rows": jnp.int32(x.shape[0]), "version": 7.0}

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, 2, has_aux=True)(params, *batch)

    check(step, PARAMS, *BATCH)


def test_results_that_are_arguments_constants_and_each_other():
    def step(params, x, y):
        loss = LOSS(params, x, y)
        return params["s1"], x, jnp.arange(3), loss, loss, 5, None

    check(step, PARAMS, *BATCH)


def through_scan(params, x, y):
    """A scan whose body holds both stages: every iteration goes around the pipeline once."""

    def body(x, p):
        x = named(dense, 0)(p["a"], x)
        return named(dense, 1)(p["b"], x), (x**2).mean()

    x, means = jax.lax.scan(body, x, params)
    return square(x, y) + means.sum()


ROUNDS = 2
STACKS = jax.tree.map(
    lambda *p: np.stack(p), *({"a": dense_params(2 * r), "b": dense_params(2 * r + 1)} for r in range(ROUNDS))
)


def test_named_computations_inside_a_scan_body():
    jitted = check(through_scan, STACKS, *BATCH, stages=2)
    assert messages(program(jitted, STACKS, *BATCH)) == 2 * ROUNDS - 1


@pytest.mark.slow
def test_gradients_of_a_scan_over_named_computations_in_a_loop_over_microbatches():
    def step(params, *batch):
        return mpmd.accumulate_gradients(through_scan, 2)(params, *batch)

    check(step, STACKS, *BATCH, stages=2)


def test_a_scan_in_reverse():
    def step(params, x, y):
        def body(x, p):
            return named(dense, 1)(p["b"], named(dense, 0)(p["a"], x)), None

        return square(jax.lax.scan(body, x, params, reverse=True)[0], y)

    check(step, STACKS, *BATCH, stages=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "stages"),
    [(6, 2), *(pytest.param(m, 4, marks=pytest.mark.slow) for m in (3, 10))],
)
def test_numbers_of_microbatches_that_no_power_of_two_divides(microbatches, stages):
    params, loss, _ = mlp(stages)
    batch = normal(1, 30, D), normal(2, 30, D)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, microbatches)(params, *batch)

    jitted = check(step, params, *batch, stages=stages)
    assert messages(program(jitted, params, *batch)) == 2 * (stages - 1) * microbatches


def test_names_under_vmap():
    def step(params, x, y):
        return jax.vmap(LOSS, in_axes=(None, 0, 0))(params, x, y).mean()

    x, y = (b.reshape(4, 2, D) for b in BATCH)
    check(jax.value_and_grad(step), PARAMS, x, y)


@pytest.mark.slow
def test_gradients_of_gradients():
    def step(params, x, y):
        def norm(params):
            return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(LOSS)(params, x, y)))

        return jax.grad(norm)(params)

    check(step, PARAMS, *BATCH)


@pytest.mark.slow
def test_forward_mode():
    def step(params, x, y):
        return jax.jvp(lambda p: LOSS(p, x, y), (params,), (params,))

    check(step, PARAMS, *BATCH)


@pytest.mark.slow
def test_a_custom_gradient_around_a_named_computation():
    @jax.custom_vjp
    def scaled(p, x):
        return named(dense, 1)(p, x)

    def forward(p, x):
        return scaled(p, x), (p, x)

    def backward(saved, g):
        _, pull = jax.vjp(named(dense, 1), *saved)
        return jax.tree.map(lambda t: 0.5 * t, pull(g))

    scaled.defvjp(forward, backward)

    def loss(params, x, y):
        x = scaled(params["s1"], named(dense, 0)(params["s0"], x))
        return named(lambda p, x, y: square(dense(p, x), y), 2)(params["s2"], x, y)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, 2)(params, *batch)

    check(step, PARAMS, *BATCH)


@pytest.mark.slow
def test_several_stages_on_one_mesh():
    """Four stages on two meshes, one after the other on each: the pipeline goes around twice."""
    params = {f"s{s}": dense_params(s) for s in range(4)}
    loss = chain(4, dense)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, 4)(params, *batch)

    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    assignment = {f"stage{s}": (f"m{s % 2}", s) for s in range(4)}
    jitted = mpmd.jit(step, mpmd.make_config(topology, assignment, schedule="gpipe"))
    assert relative_difference(jitted(params, *BATCH), jax.jit(step)(params, *BATCH)) <= 1e-5
    assert messages(program(jitted, params, *BATCH)) == 2 * 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 6, 10])
def test_two_rounds_on_four_meshes_with_any_number_of_microbatches(microbatches):
    params, loss = {f"s{s}": dense_params(s) for s in range(8)}, chain(8, dense)
    batch = normal(1, 60, D), normal(2, 60, D)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, microbatches)(params, *batch)

    topology = mpmd.make_topology({f"m{i}": 1 for i in range(4)})
    assignment = {f"stage{s}": (f"m{s % 4}", s) for s in range(8)}
    jitted = mpmd.jit(step, mpmd.make_config(topology, assignment, schedule="interleaved_1f1b"))
    assert relative_difference(jitted(params, *batch), jax.jit(step)(params, *batch)) <= 1e-5
    assert messages(program(jitted, params, *batch)) == 2 * 7 * microbatches


@pytest.mark.slow
def test_skips_from_two_stages_to_the_last():
    """Each stage of four passes on what it and others need; every gradient goes straight to its stage."""
    params = {f"s{s}": dense_params(s) for s in range(4)}

    def loss(params, x, y):
        first = named(dense, 0)(params["s0"], x)
        second = named(dense, 1)(params["s1"], first)
        third = named(dense, 2)(params["s2"], second)
        last = named(lambda p, a, b, c, y: square(dense(p, c) + a + b, y), 3)
        return last(params["s3"], first, second, third, y)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, 2)(params, *batch)

    jitted = check(step, params, *BATCH, stages=4)
    edges = [(0, 1), (1, 2), (1, 3), (2, 3), (2, 3), (3, 2), (3, 1), (3, 0), (2, 1), (1, 0)]
    assert messages_by_route(program(jitted, params, *BATCH)) == {
        e: 2 * edges.count(e) for e in sorted(edges)
    }


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_one_weight_on_four_stages(schedule):
    params, loss, batch = MODELS["shared_by_all"].build(4)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, 4)(params, *batch)

    jitted = check(step, params, *batch, stages=4, schedule=schedule)
    needed = MODELS["shared_by_all"].flow(4).needed(4)
    assert messages_by_route(program(jitted, params, *batch)) == needed


@pytest.mark.slow
def test_meshes_that_are_not_in_the_order_of_the_stages():
    def step(params, *batch):
        return mpmd.accumulate_gradients(LOSS, 4)(params, *batch)

    topology = mpmd.make_topology({"m0": 1, "m1": 1, "m2": 1})
    config = mpmd.make_config(topology, {"stage0": "m2", "stage1": "m0", "stage2": "m1"})
    jitted = mpmd.jit(step, config)
    assert relative_difference(jitted(PARAMS, *BATCH), jax.jit(step)(PARAMS, *BATCH)) <= 1e-5
    streams = {s.mesh: s.instructions for s in program(jitted, PARAMS, *BATCH).streams}
    tasks = {
        mesh: [f"{op.phase}{op.microbatch}" for op in ops if isinstance(op, Run) and op.phase]
        for mesh, ops in streams.items()
    }
    assert tasks["m2"] == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"], "the first of three stages"


def test_a_scan_that_comes_to_every_mesh_twice_says_how_it_was_ordered():
    def step(params, *batch):
        return mpmd.accumulate_gradients(through_scan, 2)(params, *batch)

    lowered = pipelined(step, 2).lower(STACKS, *BATCH)
    assert any("'interleaved_1f1b' is used instead" in warning for warning in lowered.warnings)
    assert pipelined(step, 2, "interleaved_1f1b").lower(STACKS, *BATCH).warnings == []


@pytest.mark.slow
def test_a_batch_dim_that_is_not_the_first():
    def loss(params, x, y):
        return LOSS(params, x.T, y.T)

    def step(params, x, y):
        return mpmd.accumulate_gradients(loss, 4, axis=1)(params, x, y)

    check(step, PARAMS, *(b.T for b in BATCH))


def test_a_host_loop_of_calls():
    """Microbatches as calls with a counter, in a Python loop."""

    def step(params, x, y):
        one = jax.value_and_grad(LOSS)
        total = None
        for i in range(2):
            found = mpmd.call(one, call_counter=i)(params, x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return total

    check(step, PARAMS, *BATCH)


def test_layers_concatenated_from_stages_cross_in_parts():
    """The gradient of the concatenate is slices of a sum of pads, none of which is of the whole stack."""
    layers = 2

    def loss(params, x):
        stack = jnp.concatenate(params)
        for s in range(STAGES):
            stage = named(lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], s)
            x = stage(stack[layers * s : layers * (s + 1)], x)
        return jnp.mean(x**2)

    def step(params, x):
        return mpmd.accumulate_gradients(loss, num_microbatches=2)(params, x)

    params = [normal(s, layers, D, D) for s in range(STAGES)]
    jitted = check(step, params, normal(9, 8, D))
    assert messages(program(jitted, params, normal(9, 8, D))) == 2 * 2 * (STAGES - 1)
    text = jitted.lower(params, normal(9, 8, D)).as_text("program")
    assert f"f32[{layers * STAGES},{D},{D}]" not in text
