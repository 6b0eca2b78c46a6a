"""Microbatches that come to a stage several times: they run under every schedule, one microbatch included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import ScheduleError
from mpmd.scheduling import SCHEDULES
from tests.support.comparing import relative_difference
from tests.support.evaluate_mpmd import evaluate

pytestmark = pytest.mark.usefixtures("plain_xla")


def named(name, fn, *arguments):
    return mpmd.named_computation(fn, name=name)(*arguments)


def auxiliary_loss(params, x, y):
    """The stages give out scalars, whose sum goes to the loss and is a result too."""
    h, aux = x, 0.0
    for i, w in enumerate(params):
        h, a = named(f"s{i}", lambda w, h: (jnp.tanh(h @ w), (h**2).mean()), w, h)
        aux += a
    return named("loss", lambda h, y: ((h - y) ** 2).mean(), h, y) + 0.1 * aux, aux


def there_and_back(params, x, y):
    """From m0 to m1 and back, with a second name on m0 that nothing depends on."""
    a = named("s0", jnp.tanh, params[0])
    b = named("loss", jnp.sin, x * y)
    c = named("s1", lambda a, w: (a + w) / 2, a, params[1])
    d = named("s0", lambda c: jnp.tanh(c @ c), c)
    return ((b + c) ** 2).mean() + (d**2).mean(), d


def one_name_several_times(params, x, y):
    """Three calls of one name, two of which a second mesh reads; the third uses what that makes."""
    a = named("s0", jnp.sin, x @ params[0])
    b = named("s0", lambda x: jnp.where(x > 0, x, jnp.cos(x)), y @ params[0])
    c = named("s1", jnp.maximum, b, a @ params[1])
    return named("s0", lambda c: (c**2).mean(), c), named("loss", jnp.sum, a)


def train(loss, microbatches):
    """A step of accumulated gradients."""

    def step(params, x, y):
        (value, aux), grads = mpmd.accumulate_gradients(loss, microbatches, has_aux=True)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, aux

    return step


def evaluation(loss, microbatches):
    """A loop without gradients."""

    def step(params, x, y):
        def body(total, x, y):
            value, aux = loss(params, x, y)
            return total + value, aux

        return mpmd.microbatch_loop(body, jnp.float32(0), x, y, num_microbatches=microbatches)

    return step


def gradients(loss, _):
    """Gradients without microbatches."""
    return jax.value_and_grad(loss, has_aux=True)


V_SHAPED = ("zb_v", "v_half", "v_min", "dualpipe_v")

PLACES = {
    auxiliary_loss: {"s0": ("m0", 0), "s1": ("m1", 1), "loss": ("m1", 1)},
    there_and_back: {"s0": "m0", "s1": "m1", "loss": "m0"},
    one_name_several_times: {"s0": ("m0", 0), "s1": ("m1", 1), "loss": ("m1", 1)},
}
KINDS = {"train": train, "evaluation": evaluation, "gradients": gradients}


def arguments(microbatches: int):
    draw = np.random.default_rng(0).normal
    square = [draw(size=(4, 4)).astype(np.float32) for _ in range(2)]
    return square, *(draw(size=(4 * microbatches, 4)).astype(np.float32) for _ in range(2))


def config(loss, schedule):
    return mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), PLACES[loss], schedule=schedule)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "kind", [k if k == "train" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
@pytest.mark.parametrize("loss", PLACES)
def test_every_schedule_orders_a_stage_of_several_fragments(loss, kind):
    given = arguments(1)
    step = KINDS[kind](loss, 1)
    want = jax.tree.leaves(jax.jit(step)(*given))
    seen = {}
    for schedule in SCHEDULES:
        try:
            lowered = mpmd.jit(step, config(loss, schedule)).lower(*given)
        except ScheduleError as error:
            if "comes to every mesh once" in str(error):
                assert loss is there_and_back, error  # only there a mesh has two stages
            elif schedule in V_SHAPED:
                assert "needs two stages per mesh" in str(error)
            else:
                assert schedule == "forward_only" and "the step has one" in str(error)
            continue
        if (text := lowered.as_text()) not in seen:
            seen[text] = evaluate(lowered.partitioned.module, jax.tree.leaves(given))
            assert relative_difference(seen[text], want) <= 1e-5, schedule
    assert seen


@pytest.mark.parametrize("microbatches", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loss",
    [there_and_back, *(pytest.param(f, marks=pytest.mark.slow) for f in PLACES if f != there_and_back)],
)
def test_a_stage_of_several_fragments_runs(loss, microbatches):
    given = arguments(microbatches)
    step = train(loss, microbatches)
    got = mpmd.jit(step, config(loss, "gpipe"))(*given)
    assert relative_difference(got, jax.jit(step)(*given)) <= 1e-5


def test_what_a_schedule_cannot_order_is_nearly_ordered_and_a_warning_says_so():
    """Stage 0 needs what stage 1 makes of the same microbatch, while its schedule has it go ahead."""
    given = arguments(4)
    step = train(one_name_several_times, 4)
    lowered = mpmd.jit(step, config(one_name_several_times, "1f1b")).lower(*given)
    got = evaluate(lowered.partitioned.module, jax.tree.leaves(given))
    assert relative_difference(got, jax.tree.leaves(jax.jit(step)(*given))) <= 1e-5
    assert any("as far as the data flow allows" in warning for warning in lowered.warnings)


def test_several_updates_in_one_iteration_follow_each_other():
    """Epochs of minibatches: the second one's forward needs the first one's backward, so nothing overlaps."""
    params, x, y = arguments(4)

    def of_minibatch(params, rows):
        (value, _), grads = jax.value_and_grad(auxiliary_loss, has_aux=True)(params, *rows)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def step(params, x, y):
        rows = x.reshape(2, -1, *x.shape[1:]), y.reshape(2, -1, *y.shape[1:])

        def epoch(params, _):
            return jax.lax.scan(of_minibatch, params, rows)

        return jax.lax.scan(epoch, params, None, length=2)

    lowered = mpmd.jit(step, config(auxiliary_loss, "1f1b")).lower(params, x, y)
    assert lowered.warnings == []
    got = evaluate(lowered.partitioned.module, jax.tree.leaves((params, x, y)))
    assert relative_difference(got, jax.tree.leaves(jax.jit(step)(params, x, y))) <= 1e-5
