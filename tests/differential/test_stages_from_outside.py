"""Models without names, in stages by the paths of their parameters: numbers, messages and programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpmd
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from mpmd.runtime.program.stream_memory import predict_memory
from tests.support.comparing import check_training, copied, messages, messages_by_route, relative_difference
from tests.support.layered_models import LAYERS, SEPARATE, block, entropy, separate

pytestmark = pytest.mark.usefixtures("plain_xla")

STAGES = 2
MICROBATCHES = 4


def from_outside(step, pattern, schedule="1f1b", **options):
    topology = mpmd.make_topology({f"m{s}": 1 for s in range(STAGES)})
    stages = pattern if pattern == "auto" else mpmd.by_parameters(pattern)
    config = mpmd.make_config(topology, stages=stages, schedule=schedule)
    return mpmd.jit(step, config, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEPARATE)
@pytest.mark.parametrize(
    ("schedule", "found"), [("gpipe", ""), ("1f1b", ""), ("zb_h1", ""), ("1f1b", "auto")]
)
def test_training_is_that_of_jit_with_one_message_per_microbatch_and_direction(name, schedule, found):
    params, loss, batch, pattern = SEPARATE[name]()
    pattern = found or pattern
    init, update = sgd_momentum()
    step = training_step(loss, MICROBATCHES, update)
    ours = from_outside(step, pattern, schedule, donate_argnums=0)
    check_training(ours, jax.jit(step), init(params), batch)
    program = ours.compiled(copied(init(params)), *batch).program
    assert messages_by_route(program) == {(0, 1): MICROBATCHES, (1, 0): MICROBATCHES}


def sent(program):
    """The texts of all messages, in order."""
    return [line for line in program.as_text().splitlines() if "message " in line and ":" in line]


def with_names(params, ids, targets):
    """The loss of `separate` with names by hand."""

    def first(params, ids):
        x = params["embed"][ids] + params["pos"]
        for p in params["layers"][: LAYERS // 2]:
            x = block(p, x)
        return x

    def last(params, x, targets):
        for p in params["layers"][LAYERS // 2 :]:
            x = block(p, x)
        return entropy(x @ params["head"], targets)

    x = mpmd.named_computation(first, name="stage0")(params, ids)
    return mpmd.named_computation(last, name="stage1")(params, x, targets)


@pytest.mark.parametrize(
    ("schedule", "found"), [("1f1b", "auto"), pytest.param("gpipe", "", marks=pytest.mark.slow)]
)
def test_programs_are_those_of_names_by_hand(schedule, found):
    """The same tasks in the same order, the same messages, and as many bytes on every mesh."""
    params, loss, batch, pattern = separate()
    pattern = found or pattern
    init, update = sgd_momentum()
    found = from_outside(training_step(loss, MICROBATCHES, update), pattern, schedule).lower(
        init(params), *batch
    )
    wanted = pipelined(training_step(with_names, MICROBATCHES, update), STAGES, schedule).lower(
        init(params), *batch
    )
    assert found.as_text("schedule") == wanted.as_text("schedule")
    assert sent(found.program) == sent(wanted.program)
    peaks = [[mesh.peak_bytes for mesh in predict_memory(low.program)] for low in (found, wanted)]
    assert peaks[0] == peaks[1]


def sent_shapes(program):
    return [kind.shape for channel in program.channels for kind in channel.types]


@pytest.mark.slow
def test_no_weights_are_sent_for_a_decay_inside_of_the_loss_and_conditional_updates():
    """Each stage sums its own weights; `MultiSteps` updates each leaf on its mesh."""
    params, loss, batch, pattern = separate()

    def with_decay(params, *batch):
        return loss(params, *batch) + 1e-3 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
    optimizer = optax.MultiSteps(adam, 2)

    def step(params, state, *batch):
        value, grads = mpmd.accumulate_gradients(with_decay, MICROBATCHES)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    ours = from_outside(step, pattern)
    want, got = (params, optimizer.init(params)), (params, optimizer.init(params))
    activation = (len(batch[0]) // MICROBATCHES, *batch[0].shape[1:], params["embed"].shape[1])
    sent = sent_shapes(ours.lower(*got, *batch).program)
    assert {shape for shape in sent if shape} == {activation}
    for _ in range(2):
        *want, want_loss = jax.jit(step)(*want, *batch)
        *got, got_loss = ours(*got, *batch)
    assert relative_difference((got, got_loss), (want, want_loss)) <= 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:schedule .* has nothing to order")
def test_a_gradient_of_ones_own_and_an_auxiliary_result():
    params, loss, batch, pattern = separate()

    def with_aux(params, ids, targets, *, scale):
        value = loss(params, ids, targets)
        return value * scale, {"perplexity": jnp.exp(value)}

    def step(params, ids, targets, scale):
        (value, aux), grads = jax.value_and_grad(mpmd.staged(with_aux), has_aux=True)(
            params, ids, targets, scale=scale
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, aux

    scale = np.float32(0.5)
    got = from_outside(step, pattern)(params, *batch, scale)
    assert relative_difference(got, jax.jit(step)(params, *batch, scale)) < 1e-5
    assert messages(from_outside(step, pattern).lower(params, *batch, scale).program) == 2
