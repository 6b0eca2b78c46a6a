"""What scripts that train do around a step, against plain `jax.jit`."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import PlacementError, SignatureError
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

BACKENDS = ("native", "xla")
ASSIGNMENT = {"lower": "m0", "upper": "m1"}
RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.standard_normal((4, 8), "f4"), "b": RNG.standard_normal((8, 2), "f4")}
X, Y = RNG.standard_normal((8, 4), "f4"), RNG.standard_normal((8, 2), "f4")


def loss_fn(params, x, y):
    h = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="lower")(params["a"], x)
    return mpmd.named_computation(lambda w, h, y: jnp.mean((h @ w - y) ** 2), name="upper")(params["b"], h, y)


def training_step(params, x, y):
    loss, grads = mpmd.accumulate_gradients(loss_fn, 2)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def pipelined(step, backend="native", each=1, assignment=ASSIGNMENT, **more):
    topology = mpmd.make_topology({"m0": {"data": each}, "m1": {"data": each}})
    return mpmd.jit(step, mpmd.make_config(topology, assignment, backend=backend), **more)


def scaled(x):
    return mpmd.named_computation(lambda x: x.astype(jnp.float32) * 2, name="lower")(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "all_bytes"), [("float4_e2m1fn", 6), ("float8_e4m3b11fnuz", 6), ("float8_e8m0fnu", 6)]
)
def test_narrow_floats_as_arguments(backend, dtype, all_bytes):
    """They are called in MLIR by more digits than those of their width."""
    x = np.arange(1, 7).astype(dtype)
    jitted = pipelined(lambda x: (scaled(x), x), backend, assignment={"lower": "m0"})
    doubled, same = jitted(x)
    assert same.dtype == x.dtype and (np.asarray(same) == x).all()
    assert (np.asarray(doubled) == np.asarray(jax.jit(scaled)(x))).all()
    program = jitted.compiled(x).program
    sizes = {b.type.dtype: b.type.bytes for s in program.streams for b in s.buffers}
    assert sizes == {dtype: all_bytes, "float32": 24}


@pytest.mark.fast_cases
@pytest.mark.parametrize("each", (1, 2))
@pytest.mark.parametrize("everywhere", (False, True))
def test_a_guard_against_transfers_that_nobody_asked_for(each, everywhere):
    """Values that cross between meshes were asked for."""
    step = pipelined(training_step, each=each)
    want = jax.jit(training_step)(PARAMS, X, Y)
    before = jax.config.jax_transfer_guard
    with jax.transfer_guard("disallow"):
        if everywhere:  # threads of meshes, too
            jax.config.update("jax_transfer_guard", "disallow")
        try:
            first = step(PARAMS, X, Y)
            step(first[0], X, Y)
        finally:
            jax.config.update("jax_transfer_guard", before)
    assert relative_difference(first, want) <= 1e-5
    with jax.transfer_guard("disallow_explicit"), pytest.raises(jax.errors.JaxRuntimeError):
        step(PARAMS, X, Y)


def test_static_values_that_are_equal_and_of_different_types():
    def step(x, power):
        return scaled(x) * {int: 2, float: 3, bool: 5}[type(power)]

    jitted = pipelined(step, assignment={"lower": "m0"}, static_argnames="power")
    for power in (1, 1.0, True, 1):
        assert float(jitted(jnp.ones(()), power)) == float(step(jnp.ones(()), power))


def test_an_integer_that_is_too_large_is_named_before_anything_is_consumed():
    def step(params, n, x, y):
        return training_step(params, x, y), n

    jitted = pipelined(step, donate_argnums=0)
    params = jax.tree.map(jnp.copy, PARAMS)
    for _ in range(2):  # before and after there is a program for such arguments
        with pytest.raises(SignatureError, match="n is 1099511627776, more than the integers of JAX hold"):
            jitted(params, 2**40, X, Y)
        assert not params["a"].is_deleted()
        params = jitted(params, 3, X, Y)[0][0]


@pytest.mark.parametrize("more", ({"donate_argnums": 1}, {"donate_argnames": "x"}))
def test_an_argument_that_is_both_static_and_donated(more):
    with pytest.raises(SignatureError, match="argument 'x' of training_step is both static and donated"):
        pipelined(training_step, static_argnums=1, **more)


@pytest.mark.parametrize("warm", (False, True))
def test_a_step_on_values_that_what_is_traced_closes_over(warm):
    """Its arguments have values, so that nothing but the trace tells where it is called."""
    step = pipelined(training_step)
    if warm:
        step(PARAMS, X, Y)
    for around in (
        jax.jit(lambda: step(PARAMS, X, Y)[1]),
        lambda: jax.lax.fori_loop(0, 2, lambda i, total: total + step(PARAMS, X, Y)[1], 0.0),
        pipelined(lambda: step(PARAMS, X, Y)[1]),
        pipelined(lambda: step.compiled(PARAMS, X, Y)(PARAMS, X, Y)[1]),
    ):
        with pytest.raises(
            SignatureError, match=r"the step is called inside of jax\.jit, a loop of jax\.lax"
        ):
            around()
    want = jax.jit(training_step)(PARAMS, X, Y)[1]
    assert abs(jax.grad(lambda scale: scale * step(PARAMS, X, Y)[1])(1.0) - want) < 1e-5


def ordered_and_drawn(x):
    """Sorts, whose comparison has constants, in every kind of region."""
    _, ranks = jax.lax.scan(lambda c, row: (c, jnp.argsort(-row)), 0, x)
    nested = jax.lax.fori_loop(0, 2, lambda i, x: jax.lax.map(jnp.sort, x.T).T, x)
    chosen = jax.lax.cond(x.sum() > 0, lambda x: jnp.sort(x, 0), lambda x: x, x)
    return ranks, nested, chosen, jax.lax.map(lambda row: jnp.sort(row) * 2, x, batch_size=3)


def reachable(x):
    edges = x > 0.5
    return edges @ edges.T, jax.lax.dot_general(edges, edges, (((0,), (0,)), ((), ())))


@pytest.mark.parametrize("function", (ordered_and_drawn, reachable))
def test_what_native_code_computes_by_itself(function):
    named = mpmd.named_computation(function, name="lower")
    jitted = pipelined(lambda x: named(x), assignment={"lower": "m0"})
    assert jitted.compiled(X).cost_analysis()["fallbacks"] == 0
    for got, want in zip(jitted(X), jax.jit(function)(X), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def rotated(x):
    pairs = jax.lax.complex(x[:, :3], x[:, 1:])
    weights = jnp.ones((3, 3), jnp.complex64) * 1j
    return jnp.imag(jnp.exp(pairs * 0.5)), jnp.abs(pairs @ weights), jnp.abs(pairs.sum(0))


@pytest.mark.parametrize("spec", (jax.P("data"), jax.P(None, "data")))
def test_complex_numbers_between_devices_of_a_mesh(spec):
    named = mpmd.named_computation(rotated, name="lower")
    config = mpmd.make_config(mpmd.make_topology({"m0": {"data": 2}}), {"lower": "m0"}, in_shardings=(spec,))
    jitted = mpmd.jit(lambda x: named(x), config)
    assert jitted.compiled(X).cost_analysis()["fallbacks"] == 0
    assert relative_difference(jitted(X), jax.jit(rotated)(X)) <= 1e-5


def test_powers_of_and_by_denormals():
    """Threads of XLA take denormals for zeros; powers tell them apart, as far as their results are normal."""
    some = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -3.0, 1e30, 1e-30, np.inf, -np.inf, np.nan]
    values = np.array([*some, 1e-40, -1e-40, 1e-45, 1.1e-38], np.float32)
    x, y = (np.ascontiguousarray(part).ravel() for part in np.meshgrid(values, values))
    power = mpmd.named_computation(jax.lax.pow, name="lower")
    jitted = pipelined(lambda x, y: power(x, y), assignment={"lower": "m0"})
    got = np.asarray(jitted(x, y))
    with np.errstate(all="ignore"):
        exact = (x.astype(np.float64) ** y.astype(np.float64)).astype(np.float32)
    tiny = np.abs(exact) < np.finfo(np.float32).tiny
    np.testing.assert_allclose(got, np.where(tiny, 0, exact), rtol=1e-6)


@pytest.mark.parametrize("where", ("in a name", "outside"))
def test_what_must_happen_in_order_is_refused_with_its_place(where):
    def loud(x):
        jax.debug.print("{x}", x=x[0, 0], ordered=True)
        return x * 2

    def step(x):
        h = mpmd.named_computation(loud if where == "in a name" else scaled, name="lower")(x)
        return jax.lax.fori_loop(0, 2, lambda i, h: loud(h), h) if where == "outside" else h

    with pytest.raises(
        PlacementError, match=r"in order(.*\n)*.*test_daily_use\.py:\d+.*loud(.*\n)*.*ordered=True"
    ):
        pipelined(step, assignment={"lower": "m0"})(X)


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 1), (1, 2)])
def test_values_without_elements_cross_between_meshes_of_different_sizes(first, second):
    empty = mpmd.named_computation(lambda x: (x[:0], x[:, :0], x[0, 0]), name="lower")
    joined = mpmd.named_computation(
        lambda rows, columns, one: (jnp.concatenate([rows, rows]), columns.sum(1), one + 1), name="upper"
    )

    def step(x):
        return joined(*empty(x))

    topology = mpmd.make_topology({"m0": {"data": first}, "m1": {"data": second}})
    config = mpmd.make_config(topology, ASSIGNMENT, in_shardings=jax.P("data"))
    for got, want in zip(mpmd.jit(step, config)(X), jax.jit(step)(X), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def of_integers(params, x):
    h = mpmd.named_computation(lambda p, x: x * p["w"] * p["n"], name="lower")(params, x)
    return mpmd.named_computation(jnp.mean, name="upper")(h)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_by_integers_have_no_values(backend):
    """Optimizers skip what has the dtype `float0`; a bool would be subtracted."""
    params, x = {"w": jnp.ones(3), "n": jnp.int32(2), "m": np.arange(6, dtype=np.int8)}, jnp.arange(3.0)
    step = pipelined(jax.grad(of_integers, allow_int=True), backend)
    want = jax.jit(jax.grad(of_integers, allow_int=True))(params, x)
    got = step(params, x)
    assert {k: (g.dtype, g.shape) for k, g in got.items()} == {k: (g.dtype, g.shape) for k, g in want.items()}
    assert got["n"].dtype == jax.dtypes.float0
    assert relative_difference(got["w"], want["w"]) < 1e-6


def test_what_has_no_values_goes_around():
    """A state may hold such gradients: they are arguments and results."""

    def step(grads, x):
        return jax.tree.map(lambda g: g, grads), scaled(x)

    grads = {"n": np.zeros((2, 3), jax.dtypes.float0), "w": jnp.ones(3)}
    ours = pipelined(step, "xla", assignment={"lower": "m0"}, donate_argnums=0)
    once, _ = ours(grads, X)
    twice, y = ours(once, X)
    assert twice["n"].dtype == jax.dtypes.float0 and twice["n"].shape == (2, 3)
    assert (twice["w"] == 1).all() and (y == 2 * X).all()


@jax.custom_vjp
def backward_only(x):
    return jnp.tanh(x)


backward_only.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


def cut_by_comparison(x):
    return jnp.where(backward_only(x) > 0, x * x, -x)


def cut_by_stop(x):
    return jax.lax.stop_gradient(backward_only(x)) * x


def cut_by_cast(x):
    return x * backward_only(10 * x).astype(jnp.int32)


@pytest.mark.fast_cases
@pytest.mark.parametrize("loss", (cut_by_comparison, cut_by_stop, cut_by_cast))
@pytest.mark.parametrize("where", ("inside", "outside"))
def test_the_forward_derivative_of_a_function_that_has_none_where_nothing_needs_it(loss, where):
    def derivatives(x):
        return jax.jvp(loss, (x,), (jnp.ones_like(x),))

    def step(x, unused):
        lower = mpmd.named_computation(derivatives if where == "inside" else lambda x: x + 0, name="lower")
        value, slope = lower(x) if where == "inside" else derivatives(lower(x))
        return mpmd.named_computation(lambda a, b: (2 * a, b + 1), name="upper")(value, slope)

    got, want = pipelined(step, "xla")(X, Y), jax.jit(step)(X, Y)
    assert relative_difference(jax.device_get(got), want) < 1e-6


def test_the_forward_derivative_of_a_function_that_has_none_where_it_is_needed():
    """The error is JAX's own."""

    def step(x):
        value, slope = jax.jvp(backward_only, (x,), (jnp.ones_like(x),))
        return mpmd.named_computation(jnp.add, name="lower")(value, slope)

    with pytest.raises(TypeError, match="forward-mode autodiff"):
        pipelined(step, "xla", assignment={"lower": "m0"})(X)


def test_first_timelines_in_several_threads():
    """What they time fragments by is registered with XLA once; JAX refuses a second registration."""
    compiled = pipelined(training_step, "xla").compiled(PARAMS, X, Y)
    others = pipelined(lambda p, x, y: training_step(p, x, y)[1], "xla").compiled(PARAMS, X, Y)
    errors: list[Exception] = []
    barrier = threading.Barrier(2)

    def measured(step):
        try:
            barrier.wait()
            step.timeline(PARAMS, X, Y)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=measured, args=(step,)) for step in (compiled, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
