"""What people who know JAX try first, against `jax.jit`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import mpmd
from examples.workloads.models import normal
from mpmd.errors import ConfigError, FragmentError, NonFiniteError, SignatureError
from mpmd.runtime.program.streams import Fetch
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

MICROBATCHES = 2
BACKENDS = ("native", "xla")
ASSIGNMENT = {"lower": "m0", "upper": "m1"}


def drawn(seed, *shape):
    """An array of JAX, for which nothing is compiled while tests are collected."""
    return jax.device_put(normal(seed, *shape, scale=1.0))


PARAMS = {
    "a": {"b": jax.device_put(np.zeros(6, np.float32)), "w": drawn(0, 4, 6)},
    "b": {"b": jax.device_put(np.zeros(2, np.float32)), "w": drawn(1, 6, 2)},
}
X, Y = drawn(2, 8, 4), drawn(3, 8, 2)


def lower(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def upper(p, h, y):
    return jnp.mean((h @ p["w"] + p["b"] - y) ** 2)


def loss_fn(params, x, y):
    h = mpmd.named_computation(lower, name="lower")(params["a"], x)
    return mpmd.named_computation(upper, name="upper")(params["b"], h, y)


def sgd(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads)


def pipelined(step, backend="native", each=1, **more):
    topology = mpmd.make_topology({"m0": each, "m1": each})
    return mpmd.jit(step, mpmd.make_config(topology, ASSIGNMENT, backend=backend, **more))


def data(tree):
    """Keys as the numbers they are made of."""
    return jax.tree.map(
        lambda a: jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a, tree
    )


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "each"), [("native", 1), ("native", 2), ("xla", 2)])
def test_an_optimizer_that_adds_noise(backend, each):
    """Its random numbers count in 64 bits, and the counts go from fragment to fragment."""
    tx = optax.chain(optax.add_noise(0.01, 0.5, 3), optax.sgd(1e-2))

    def step(state, x, y):
        params, moments = state
        loss, grads = mpmd.accumulate_gradients(loss_fn, MICROBATCHES)(params, x, y)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    shardings = (None, jax.P("data"), jax.P("data")) if each > 1 else None
    state = PARAMS, tx.init(PARAMS)
    jitted = pipelined(step, backend, each, in_shardings=shardings)
    assert jitted.compiled(state, X, Y).cost_analysis()["fallbacks"] == 0
    got = jitted(state, X, Y)
    assert relative_difference(data(got), data(jax.jit(step)(state, X, Y))) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_64_bits_between_meshes_of_different_sizes(backend):
    """A user who has not enabled them meets them as random bits only."""
    first = mpmd.named_computation(lambda x: jax.lax.iota(np.uint32, 8) + x, name="lower")
    second = mpmd.named_computation(lambda k, x: jax.random.bits(k, (8,)) + x, name="upper")

    def step(key, x):
        noise = jax.random.bits(key, (8,))
        return second(key, first(x) + noise) + noise

    topology = mpmd.make_topology({"m0": 1, "m1": {"data": 2}})
    config = mpmd.make_config(topology, ASSIGNMENT, backend=backend, out_shardings=jax.P("data"))
    key, x = jax.random.key(1), jnp.arange(8, dtype=jnp.uint32)
    assert (np.asarray(mpmd.jit(step, config)(key, x)) == np.asarray(jax.jit(step)(key, x))).all()


@pytest.mark.fast_cases
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("each", [1, 2])
def test_complex_numbers(backend, each):
    w = drawn(0, 4, 4) * (1 - 0.5j)

    def loss_fn(ws, x, y):
        h = mpmd.named_computation(lambda w, x: jnp.fft.fft((x * (1 + 2j)) @ w) * 1j, name="lower")(ws[0], x)
        last = mpmd.named_computation(
            lambda w, h, y: jnp.mean(jnp.abs(h @ w * 0.5j - y[:, :1]) ** 2), name="upper"
        )
        return last(ws[1], h, y)

    def step(ws, x, y):
        loss, grads = mpmd.accumulate_gradients(loss_fn, MICROBATCHES)(ws, x, y)
        made = jax.tree.map(lambda w, g: w * (2 - 3j) - (0.01 + 0j) * jnp.conj(g), ws, grads)
        return made, loss + jnp.real(jnp.asarray(1j) * 1j)

    shardings = (None, jax.P("data"), jax.P("data")) if each > 1 else None
    got, want = (
        pipelined(step, backend, each, in_shardings=shardings)([w, w], X, Y),
        jax.jit(step)([w, w], X, Y),
    )
    parts = [
        [f(jax.device_get(leaf)) for leaf in jax.tree.leaves(t) for f in (np.real, np.imag)]
        for t in (got, want)
    ]
    assert relative_difference(*parts) <= 1e-5


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("argnums", "pick"),
    [(-1, lambda g: g), ([2], lambda g: g[0]), ((-1,), lambda g: g[0]), (np.int64(2), lambda g: g)],
)
def test_every_way_to_say_by_what_to_differentiate(argnums, pick):
    def turned(x, y, params):
        return loss_fn(params, x, y)

    loss, grads = mpmd.accumulate_gradients(turned, MICROBATCHES, argnums=argnums)(X, Y, PARAMS)
    want = jax.value_and_grad(loss_fn)(PARAMS, X, Y)
    assert relative_difference((loss, pick(grads)), want) <= 1e-5


def test_batches_by_keyword():
    def by_keyword(params, x, *, y):
        return loss_fn(params, x, y)

    def step(params, x, y):
        return mpmd.accumulate_gradients(by_keyword, MICROBATCHES)(params, x, y=y)

    got = pipelined(step)(PARAMS, X, Y)
    assert relative_difference(got, jax.value_and_grad(loss_fn)(PARAMS, X, Y)) <= 1e-5


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"x": np.asarray(X)[:7], "y": {"c": np.asarray(Y)[:5]}},
            ["x is float32[7,4]: dim 0 has 7 rows", "y['c'] is float32[5,2]", "a multiple of"],
        ),
        ({"x": X, "y": 0.1}, ["y is float32[]: it has no dim 0\n  let the function close over"]),
        ({"x": X, "y": "s"}, ["y is 's', which is not an array\n  let the function close over"]),
    ],
)
def test_a_batch_that_cannot_be_cut_is_named_as_the_function_does(more, told):
    with pytest.raises(SignatureError) as caught:
        mpmd.accumulate_gradients(lambda p, x, y: 0.0, MICROBATCHES)(PARAMS, *more.values())
    assert all(words in str(caught.value) for words in told)


@pytest.mark.parametrize(
    ("argnums", "told"), [((0, -3), "twice"), (-4, "got 3"), ("p", "must be the position")]
)
def test_arguments_to_differentiate_by_that_are_none(argnums, told):
    with pytest.raises(SignatureError, match=told):
        mpmd.accumulate_gradients(loss_fn, MICROBATCHES, argnums=argnums)(PARAMS, X, Y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_of_complex_numbers(backend):
    """What only makes zeros needs no program, whatever they are."""
    first = mpmd.named_computation(lambda: jnp.zeros((2, 3), jnp.complex64), name="lower")
    second = mpmd.named_computation(lambda z: z + 1j, name="upper")
    got = pipelined(lambda: second(first()), backend)()
    assert got.dtype == jnp.complex64 and (np.asarray(got) == np.full((2, 3), 1j)).all()


def training_step(params, x, y):
    loss, grads = mpmd.accumulate_gradients(loss_fn, MICROBATCHES)(params, x, y)
    return sgd(params, grads), loss


@pytest.mark.fast_cases
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_64_bits_enabled(backend, schedule):
    with jax.enable_x64(True):
        state = jax.tree.map(lambda a: np.asarray(a, np.float64), (PARAMS, X, Y))
        got = pipelined(training_step, backend, schedule=schedule)(*state)
        want = jax.jit(training_step)(*state)
        assert got[1].dtype == np.float64 and relative_difference(got, want) <= 1e-13


def test_a_deleted_argument_is_named_before_anything_is_consumed():
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    step = mpmd.jit(training_step, mpmd.make_config(topology, ASSIGNMENT), donate_argnums=0)
    params = jax.tree.map(jnp.copy, PARAMS)
    params["b"]["w"].delete()
    with pytest.raises(SignatureError, match=r"deleted before the step: params\['b'\]\['w'\]\n"):
        step(params, X, Y)
    assert not params["a"]["w"].is_deleted()
    params = jax.tree.map(jnp.copy, PARAMS)
    step(params, X, Y)
    with pytest.raises(SignatureError, match=r"deleted before the step: .* and 1 more\n  they were donated"):
        step(params, X, Y)


@pytest.mark.parametrize(
    ("transform", "given"), [(jax.jit, X), (jax.vmap, normal(2, 1, 8, 4)), (jax.grad, X)]
)
@pytest.mark.parametrize("warm", [False, True])
def test_a_step_inside_of_a_transformation_says_so(transform, given, warm):
    step = pipelined(training_step)
    if warm:
        step(PARAMS, X, Y)
    with pytest.raises(SignatureError, match="the step is called inside of"):
        transform(lambda x: step(PARAMS, x, Y)[1])(given)


def test_what_a_compiled_step_does_not_take():
    compiled = pipelined(training_step).lower(PARAMS, X, Y).compile()
    for args, kwargs, told in (
        ((PARAMS, X), {}, "missing: y"),
        ((PARAMS, X, Y, 1), {}, "not expected: argument 3"),
        ((PARAMS, X), {"y": Y}, "missing: y\n  not expected: y by keyword"),
        (({"a": PARAMS["a"]}, X, Y), {}, r"missing: params\['b'\]\['b'\], params\['b'\]\['w'\]"),
        ((PARAMS, "x", Y), {}, "x is 'x', a str, which is not an array"),
        ((PARAMS, X, 3), {}, r"y: got int32\[\], compiled for float32\[8,2\]"),
    ):
        for call in (compiled, compiled.timeline, compiled.costs, compiled.live_bytes):
            with pytest.raises(SignatureError, match=told):
                call(*args, **kwargs)


@pytest.mark.fast_cases
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "switch, value, kind", [("debug_nans", jnp.nan, "NaN"), ("debug_infs", jnp.inf, "infinite")]
)
def test_the_switches_of_jax_that_look_for_nans_and_infinities(backend, switch, value, kind):
    step, broken = pipelined(training_step, backend), Y.at[0, 0].set(value)
    with getattr(jax, switch)(True):
        assert relative_difference(step(PARAMS, X, Y), jax.jit(training_step)(PARAMS, X, Y)) <= 1e-5
        told = f"{kind} value, and so did argument y of the step"
        with pytest.raises(NonFiniteError, match=told) as caught:
            step(PARAMS, X, broken)
    assert isinstance(caught.value, FragmentError) and isinstance(caught.value, FloatingPointError)


@pytest.mark.slow
def test_the_switch_of_jax_that_turns_jit_off():
    seen = []

    def step(params, x, y):
        made = training_step(params, x, y)
        seen.append(float(made[1]))
        return made

    with jax.disable_jit():
        _, loss = pipelined(step)(PARAMS, X, Y)
    assert seen == [float(loss)]


class Normed(nn.Module):
    """A stage that changes two collections: statistics, and what it sows."""

    features: int

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(self.features)(x))
        self.sow("intermediates", "mean", x.mean())
        return jnp.tanh(x)


class Net(nn.Module):
    """Two such stages, with names or without."""

    named: bool = True

    def setup(self):
        self.first, self.second = Normed(6), Normed(2)

    def __call__(self, x):
        for stage, name in ((self.first, "lower"), (self.second, "upper")):
            x = (mpmd.named_computation(stage, name=name) if self.named else stage)(x)
        return x


@pytest.mark.slow
def test_linen_modules_that_change_state_in_a_stage():
    variables = Net().init(jax.random.key(0), X)

    def step(named, params, stats, x, y):
        def loss_fn(params, x, y):
            net = Net(named)
            out, changed = net.apply(
                {"params": params, "batch_stats": stats}, x, mutable=["batch_stats", "intermediates"]
            )
            return jnp.mean((out - y) ** 2), changed

        (loss, changed), grads = mpmd.accumulate_gradients(loss_fn, MICROBATCHES, has_aux=True)(params, x, y)
        return sgd(params, grads), changed, loss

    given = variables["params"], variables["batch_stats"], X, Y
    want = jax.jit(functools.partial(step, False))(*given)
    assert set(want[1]["intermediates"]) == {"first", "second"}
    for got in (
        pipelined(functools.partial(step, True))(*given),
        jax.jit(functools.partial(step, True))(*given),
    ):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert relative_difference(got, want) <= 1e-5


def test_a_step_that_is_a_method():
    topology = mpmd.make_topology({"m0": 1, "m1": 1})

    class Trainer:
        """Holds what is no array."""

        rate = 0.5

        @mpmd.jit(mpmd.make_config(topology, ASSIGNMENT), static_argnums=0)
        def step(self, params, x, y):
            """One step of SGD."""
            loss, grads = mpmd.accumulate_gradients(loss_fn, MICROBATCHES)(params, x, y)
            return sgd(params, grads, self.rate), loss

    trainer = Trainer()
    loss, grads = jax.value_and_grad(loss_fn)(PARAMS, X, Y)
    assert relative_difference(trainer.step(PARAMS, X, Y), (sgd(PARAMS, grads, 0.5), loss)) <= 1e-5


@pytest.mark.parametrize("constraint", [(0, 3), (3, 0), (5, 4)])
def test_an_argument_and_a_result_of_different_shapes_that_must_share_a_mesh(constraint):
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    config = mpmd.make_config(topology, ASSIGNMENT, constraints=(constraint,))
    step = mpmd.jit(training_step, config)
    meshes = {
        stream.mesh
        for stream in step.lower(PARAMS, X, Y).program.streams
        for op in stream.instructions
        if isinstance(op, Fetch) and op.output == constraint[1]
    }
    assert meshes == {"m0" if constraint[0] == 0 else "m1"}
    assert relative_difference(step(PARAMS, X, Y), jax.jit(training_step)(PARAMS, X, Y)) <= 1e-5


def test_one_place_for_all_arguments():
    """As under `jax.jit`, a prefix may be one entry for everything."""
    texts = []
    for meshes, shardings in (("m1", jax.P("data")), (("m1",) * 3, (jax.P("data"),) * 3), (None, None)):
        config = mpmd.make_config(
            mpmd.make_topology({"m0": 2, "m1": 2}), ASSIGNMENT, input_meshes=meshes, in_shardings=shardings
        )
        texts.append(mpmd.jit(training_step, config).lower(PARAMS, X, Y).as_text())
    assert texts[0] == texts[1] != texts[2]


def test_a_name_with_a_comma_is_refused():
    topology = mpmd.make_topology({"m0": 1})
    with pytest.raises(ConfigError, match="'a,b' is assigned to 'm0': a name has no commas"):
        mpmd.make_config(topology, {"a,b": "m0"})


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"in_shardings": (None, jax.P("data"))}, "a tuple of 2, and the arguments have a tuple of 3"),
        ({"out_shardings": (None,)}, "a tuple of 1, and the results have a tuple of 2"),
        ({"in_shardings": jax.P("x")}, "argument params['a']['b']: P('x',) names an unknown axis 'x'"),
        ({"out_shardings": (None, jax.P("data"))}, "result[1]: P('data',) is for 1 dims, but it has 0"),
    ],
)
def test_shardings_that_do_not_fit_are_told_by_path(more, told):
    with pytest.raises(ConfigError) as caught:
        pipelined(training_step, each=2, **more).lower(PARAMS, X, Y)
    assert told in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_four_bits(backend):
    """JAX refuses them in what was compiled ahead of time, which fragments are."""

    def scaled(w, x):
        numbers, scale = w
        return x @ (numbers.astype(jnp.float32) * scale)

    def step(weights, x):
        h = mpmd.named_computation(scaled, name="lower")(weights[0], x)
        doubled = jax.tree.map(lambda a: a + a, weights[1])
        return mpmd.named_computation(scaled, name="upper")(weights[1], h), doubled, weights

    weights = [((10 * p["w"]).astype(jnp.int4), jnp.float32(0.1)) for p in PARAMS.values()]
    ours = pipelined(step, backend)
    result, doubled, same = ours(weights, X)
    want = jax.jit(step)(weights, X)
    assert relative_difference(result, want[0]) < 1e-5
    for got, expected in zip(jax.tree.leaves((doubled, same)), jax.tree.leaves(want[1:]), strict=True):
        assert got.dtype == expected.dtype and (jax.device_get(got) == jax.device_get(expected)).all()
    again, _, _ = ours(same, X)  # results are arguments
    assert relative_difference(again, want[0]) < 1e-5


@pytest.mark.fast_cases("zb_h1")
@pytest.mark.parametrize("schedule", ("1f1b", "zb_h1"))
def test_two_encoders_in_one_stage(schedule):
    """Neither uses the other, and still they are one fragment per microbatch, as all names of a stage."""

    def towers(params, x, y):
        a = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="left")(params[0], x)
        b = mpmd.named_computation(lambda w, y: jnp.sin(y @ w), name="right")(params[1], y)
        return mpmd.named_computation(lambda a, b: jnp.mean((a - b) ** 2), name="distance")(a, b)

    def step(params, x, y):
        return mpmd.accumulate_gradients(towers, MICROBATCHES)(params, x, y)

    assignment = {"left": ("m0", 0), "right": ("m0", 0), "distance": ("m1", 1)}
    config = mpmd.make_config(
        mpmd.make_topology({"m0": 1, "m1": 1}), assignment, schedule=schedule, backend="xla"
    )
    params = [drawn(0, 4, 3), drawn(1, 2, 3)]
    assert relative_difference(mpmd.jit(step, config)(params, X, Y), jax.jit(step)(params, X, Y)) < 1e-5
