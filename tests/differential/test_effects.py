"""Promises of docs/guides/effects-and-results.md: how often effects happen, where, and with which values."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import mpmd
from mpmd.errors import FragmentError, PlacementError

pytestmark = [
    pytest.mark.usefixtures("plain_xla"),
    pytest.mark.filterwarnings("ignore:.*compiled by XLA as a whole"),
]
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class CallCounter:
    """A function that gives 1, 2, 3, ... as f32[]."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1
        return np.float32(self.calls)


def named(name, function):
    return mpmd.named_computation(function, name=name)


def two_meshes(**options):
    return mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"a": "m0", "b": "m1"}, **options)


def finished(value):
    jax.block_until_ready(value)
    jax.effects_barrier()
    return value


def test_a_value_from_outside_that_two_meshes_read_is_one_value():
    draw = CallCounter()

    def step(x):
        h = named("a", lambda x: x + 1)(x)
        scale = io_callback(draw, SCALAR, h.sum())
        return named("b", lambda h: h * 2)(h) * scale, h * scale

    twice, once = finished(mpmd.jit(step, two_meshes())(jnp.ones(4)))
    assert draw.calls == 1
    np.testing.assert_array_equal(twice, 2 * np.asarray(once))


@pytest.mark.parametrize("draws", ["io_callback", "rng_uniform"])
def test_a_batch_from_outside_is_read_once(draws):
    draw = CallCounter()

    def batch():
        if draws == "rng_uniform":
            return jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), (4, 2))
        return jnp.full((4, 2), io_callback(draw, SCALAR))

    def step(w):
        x = batch()
        h = named("a", lambda w, x: x * w)(w, x)
        return named("b", lambda h, x: jnp.abs(h - x).max())(h, x)

    assert finished(mpmd.jit(step, two_meshes())(jnp.ones(2))) == 0
    assert draw.calls == (draws == "io_callback")


def test_a_random_value_from_a_key_is_the_same_wherever_it_is_computed():
    def step(x, state):
        noise = jax.lax.rng_bit_generator(state, (3,), dtype=jnp.uint32)[1]
        bits = jax.random.bits(jax.random.key(1), (3,))

        def times(x, *n):
            return [x * m.astype(jnp.float32) for m in n]

        return named("a", times)(x, noise, bits), named("b", times)(x + 0, noise, bits)

    first, second = finished(mpmd.jit(step, two_meshes())(jnp.float32(2), jnp.arange(4, dtype=jnp.uint32)))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_effect_between_stages_happens_once_for_every_microbatch():
    seen = []

    def loss(w, x):
        h = named("a", lambda w, x: x * w)(w, x)
        jax.debug.callback(lambda v: seen.append(float(v)), h.sum())
        return named("b", lambda h: h.mean())(h)

    def step(w, x):
        return mpmd.accumulate_gradients(loss, 4)(w, x)

    x = jnp.arange(24.0).reshape(8, 3)
    finished(mpmd.jit(step, two_meshes())(jnp.ones(3), x))
    assert sorted(seen) == [15.0, 51.0, 87.0, 123.0]


def test_a_value_drawn_between_stages_is_that_of_its_microbatch_in_the_backward_too():
    draw = CallCounter()

    def loss(w, x):
        scale = io_callback(draw, SCALAR)
        h = named("a", lambda w, x, s: x * w * s)(w, x, scale)
        return named("b", lambda h, s: (h * s).sum())(h, scale)

    def step(w, x):
        return mpmd.accumulate_gradients(loss, 2)(w, x)

    value, gradient = finished(mpmd.jit(step, two_meshes())(jnp.ones(()), jnp.ones(2)))
    assert draw.calls == 2
    assert float(value) == float(gradient) == (1.0 + 4.0) / 2


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("merge", [False, True])
def test_a_fragment_with_effects_is_not_computed_again_for_its_backward(merge):
    draw = CallCounter()

    def loss(w, x):
        h = named("a", lambda w, x: x * w * io_callback(draw, SCALAR))(w, x)
        return named("b", lambda h: h.sum())(h)

    def step(w, x):
        return mpmd.accumulate_gradients(loss, 2)(w, x)

    options = mpmd.PipelineOptions(fragment_remat=True, merge_remat_fragments=merge)
    run = mpmd.jit(step, two_meshes(options=options, schedule="gpipe"))
    value, gradient = finished(run(jnp.ones(()), jnp.ones(4)))
    assert draw.calls == 2
    assert float(value) == float(gradient) == (1.0 * 2 + 2.0 * 2) / 2


def layer(seen, w, x):
    jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
    return jnp.tanh(x @ w)


def of_list(seen, p, x):
    for i, w in enumerate(p["layers"]):
        with jax.named_scope(f"layer{i}"):
            x = layer(seen, w, x)
    return jnp.mean(x**2)


def of_stack(seen, p, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(seen, w, x), None), x, p["layers"])[0] ** 2)


STAGES = {
    "by_parameters": (of_list, mpmd.by_parameters(r"layers/(\d+)")),
    "by_scopes": (of_list, mpmd.by_scopes(r"layer(\d+)")),
    "auto": (of_list, "auto"),
    "split": (of_stack, mpmd.split("layers")),
    "split_auto": (of_stack, "auto"),
}


@pytest.mark.fast_cases("by_parameters")
@pytest.mark.parametrize("stages", STAGES)
def test_effects_in_stages_from_outside_happen_once_for_every_microbatch(stages):
    seen = []
    loss, selector = STAGES[stages]
    layers = [jnp.eye(4)] * 2
    p = {"layers": jnp.stack(layers) if loss is of_stack else layers}

    def step(p, x):
        return mpmd.accumulate_gradients(functools.partial(loss, seen), 2)(p, x)

    finished(jax.jit(step)(p, jnp.ones((4, 4))))
    wanted = sorted(seen)
    seen.clear()
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), stages=selector)
    finished(mpmd.jit(step, config)(p, jnp.ones((4, 4))))
    assert sorted(seen) == pytest.approx(wanted)


def test_a_function_without_effects_may_be_called_back_for():
    def step(x):
        h = named("a", lambda x: x + 1)(x)
        h = jax.pure_callback(lambda v: np.asarray(v) * 3, jax.ShapeDtypeStruct((4,), jnp.float32), h)
        return named("b", lambda h: h - 1)(h)

    np.testing.assert_array_equal(mpmd.jit(step, two_meshes())(jnp.ones(4)), np.full(4, 5.0))


@pytest.mark.parametrize("place", ["in a stage", "between stages"])
@pytest.mark.parametrize("kind", ["print", "callback", "io_callback"])
def test_an_order_between_effects_is_refused_with_its_line(kind, place):
    def effect(x):
        if kind == "print":
            jax.debug.print("{}", x.sum(), ordered=True)
        elif kind == "callback":
            jax.debug.callback(lambda v: None, x.sum(), ordered=True)
        else:
            io_callback(lambda v: None, None, x.sum(), ordered=True)
        return x

    def step(x):
        h = named("a", effect if place == "in a stage" else lambda x: x + 1)(x)
        return named("b", lambda h: h * 2)(h if place == "in a stage" else effect(h))

    with pytest.raises(PlacementError, match=re.escape(__file__.rpartition("/")[2])):
        mpmd.jit(step, two_meshes())(jnp.ones(4))


def test_an_effect_runs_where_its_work_is_placed():
    def step(x):
        h = named("a", lambda x: x + 1)(x)
        jax.debug.callback(lambda v: None, h.sum())
        h = named("b", lambda h: h * 2)(h)
        io_callback(lambda v: None, None, h.sum())
        return h

    text = mpmd.jit(step, two_meshes()).lower(jnp.ones(4)).as_text("mpmd")
    meshes = dict(re.findall(r'fragment_call<mesh="(\w+)".*? @("?[\w.:<>]+"?)\(', text))
    bodies = re.split(r"\n  func\.func ", text)
    calling = {
        mesh for mesh, name in meshes.items() for b in bodies if f"@{name}(" in b and "custom_call" in b
    }
    assert calling == {"m0", "m1"} and text.count("stablehlo.custom_call") == 2


def test_an_error_in_a_callback_between_stages_names_the_mesh():
    def fail(_):
        raise ValueError("not today")

    def step(x):
        h = named("a", lambda x: 2 * x)(x)
        return named("b", lambda h, s: h * s)(h, io_callback(fail, SCALAR, h.sum()))

    compiled = (
        mpmd.jit(step, two_meshes()).lower(jnp.ones(4)).compile(runtime=mpmd.RuntimeOptions(blocking=True))
    )
    with pytest.raises(FragmentError, match=r"failed on mesh 'm\d', step 0") as caught:
        compiled(jnp.ones(4))
    assert "not today" in str(caught.value)
    compiled.close()


def test_effects_of_python_happen_once_while_the_step_is_traced():
    traced = []

    def stage(x):
        traced.append(1)
        return x + 1

    run = mpmd.jit(lambda x: named("b", jnp.log)(named("a", stage)(x)), two_meshes())
    for _ in range(3):
        finished(run(jnp.ones(4)))
    assert len(traced) == 1


@pytest.mark.slow
def test_a_key_that_all_microbatches_close_over_is_the_same_in_each():
    key = jax.random.key(3)

    def loss(w, x):
        noise = jax.random.normal(key, x.shape)
        return named("b", lambda h: h.sum())(named("a", lambda w, x: w * x * 0 + w * noise)(w, x))

    def step(w, x):
        return mpmd.accumulate_gradients(loss, 4)(w, x)

    x = jnp.ones((4, 2))
    value, _ = mpmd.jit(step, two_meshes())(jnp.ones(()), x)
    assert float(value) == pytest.approx(float(jax.random.normal(key, (1, 2)).sum()), rel=1e-6)


def test_without_inferred_transfers_an_effect_for_two_meshes_is_refused_at_its_line():
    def step(x):
        h = named("a", lambda x: x + 1)(x)
        scale = io_callback(CallCounter(), SCALAR)
        return named("a", lambda h, s: h * s)(h, scale), named("b", lambda s: s * 2)(scale)

    config = two_meshes(options=mpmd.PipelineOptions(infer_transfers=False))
    with pytest.raises(mpmd.errors.MpmdError, match=r"needed on a mesh where it is not"):
        mpmd.jit(step, config)(jnp.ones(4))
