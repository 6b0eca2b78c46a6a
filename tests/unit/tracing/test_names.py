"""Names survive whatever JAX does to a function, with the right transpose counts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd import ir
from mpmd.errors import PlacementError, SignatureError
from mpmd.passes.verify import verify
from mpmd.tracing.microbatch_loops import accumulate_gradients, fori_loop, microbatch_loop
from mpmd.tracing.names import call, decode, encode, named_computation, named_tensor
from mpmd.tracing.trace import live_names, to_module

TOPOLOGY = ir.TopologyAttr.from_axes({"m0": {"x": 1}, "m1": {"x": 1}})
W, X = np.ones((4, 4), "f4"), np.ones((2, 4), "f4")


def layer(w, x):
    return jnp.tanh(x @ w)


def loss(w, x):
    h = named_computation(layer, name="f")(w, x)
    return named_computation(lambda h: (h * h).sum(), name="g")(h)


def module_of(fn, *args):
    module = to_module(jax.jit(fn, keep_unused=True).lower(*args), TOPOLOGY)
    verify(module)
    return module


def names_in(module):
    """All names with their transpose counts, in program order, callees last."""
    return [str(op.named) for f in ir.funcs(module) for op in ir.walk(f, ir.NamedComputation)]


@pytest.mark.parametrize("name", ["f", "stage 0/a", "ümläut", "a.b-c", "f_0", "x.1."])
@pytest.mark.parametrize("suffix", ["", "_0", "_12"])
def test_every_name_comes_back_from_its_symbol(name, suffix):
    assert decode(encode("comp", name) + suffix) == ("comp", name)


def test_other_symbols_are_no_names():
    assert decode("closed_call") is None
    assert decode("mpmd") is None


def test_forward_names():
    assert names_in(module_of(loss, W, X)) == ['"f"', '"g"']


def test_gradients_are_transposed_once():
    assert names_in(module_of(jax.grad(loss), W, X)) == ['"f"', '"g"', '"g"(1)', '"f"(1)']


def test_arguments_that_are_no_arrays():
    """They choose what is computed, so a nested jit must not see them; each choice is compiled once."""
    compiled = []

    def chosen(x, kind, settings, *, train):
        compiled.append(kind)
        h = {"double": 2 * x, "same": x}[kind] * settings["by"]
        return settings["then"](h) if train else h

    named = named_computation(chosen, name="f")
    settings = {"by": 3, "then": None}
    for _ in range(2):
        assert (named(X, "double", settings, train=False) == 6).all()
    assert compiled == ["double"]
    assert (named(X, "same", {"by": 3.0, "then": jnp.negative}, train=True) == -3).all()

    def loss(x):
        return named(x, "double", {"by": 1.0, "then": jnp.sum}, train=True)

    assert names_in(module_of(jax.grad(loss), X)) == ['"f"', '"f"(1)']


def test_names_inside_a_users_own_jit():
    assert names_in(module_of(jax.grad(jax.jit(loss)), W, X)) == ['"f"', '"g"', '"g"(1)', '"f"(1)']


def test_what_is_computed_anew_is_backward_work():
    """`f` runs again, and then backward, both when the gradient is computed."""
    found = names_in(module_of(jax.value_and_grad(jax.checkpoint(loss)), W, X))
    assert found == ['"f"', '"g"', '"f"(1)', '"g"(1)', '"f"(1)']


def test_names_under_vmap():
    batched = jax.vmap(loss, in_axes=(None, 0))
    assert names_in(module_of(batched, W, jnp.ones((3, 2, 4)))) == ['"f"', '"g"']


def test_names_around_a_custom_vjp():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

    def with_custom(w, x):
        return loss(w, double(x))

    assert names_in(module_of(jax.grad(with_custom), W, X)) == ['"f"', '"g"', '"g"(1)', '"f"(1)']


def test_second_derivatives_count_twice():
    def scalar(w):
        return named_computation(lambda w: jnp.sin(w).sum(), name="f")(w)

    found = names_in(module_of(jax.grad(lambda w: jax.grad(scalar)(w).sum()), W))
    assert '"f"(1)' in found
    assert any("(2)" in name or "(1)" in name for name in found)


def test_a_decorator_takes_the_functions_name():
    @named_computation
    def encoder(x):
        return 2 * x

    @named_computation(name="other")
    def decoder(x):
        return 3 * x

    assert names_in(module_of(lambda x: decoder(encoder(x)), X)) == ['"encoder"', '"other"']
    assert encoder.__name__ == "encoder"


def test_methods_partial_functions_and_keywords_are_named_as_by_jit():
    class Encoder:
        def encode(self, x, *, times):
            return times * x

    of_method = named_computation(Encoder().encode)
    twice = named_computation(functools.partial(functools.partial(layer, x=X)))
    module = module_of(lambda w, x: twice(w) + of_method(x, times=2), W, X)
    assert names_in(module) == ['"layer"', '"encode"']


def test_nested_names_stay_nested():
    def outer(x):
        return named_computation(lambda x: 2 * x, name="inner")(x) + 1

    module = module_of(lambda x: named_computation(outer, name="outer")(x), X)
    assert names_in(module) == ['"outer"', '"inner"']
    (top,) = ir.ops(ir.funcs(module)[0], ir.NamedComputation)
    assert top.named.name == "outer"


def test_named_tensors():
    module = module_of(lambda x: named_tensor({"a": x, "b": 2 * x}, "t")["b"], X)
    assert len(ir.walk(ir.funcs(module)[0], ir.NamedTensor)) == 2


def test_names_do_not_change_values():
    want = jax.grad(lambda w, x: (layer(w, x) ** 2).sum())(W, X)
    assert jnp.allclose(jax.grad(loss)(W, X), want)
    assert (named_tensor(X, "t") == X).all()


def test_calls_share_a_callee():
    def step(w, x):
        for i in range(3):
            x = call(loss_and_x, call_counter=i)(w, x)
        return x

    def loss_and_x(w, x):
        return named_computation(layer, name="f")(w, x)

    module = module_of(step, W, X)
    calls = ir.ops(ir.symbol_table(module)["main"], ir.Call)
    assert [c.call_counter for c in calls] == [0, 1, 2]
    assert len({c.callee_name for c in calls}) == 1
    assert names_in(module) == ['"f"']


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_a_loop_is_traced_once_whatever_its_length(microbatches):
    module = module_of(lambda w, x: accumulate_gradients(loss, microbatches)(w, x), W, jnp.ones((8, 4)))
    assert len(names_in(module)) == 4
    (loop,) = ir.ops(ir.symbol_table(module)["main"], ir.For)
    assert loop.trip_count == microbatches


def test_the_general_loop_and_fori_loop():
    def run(w, x):
        total, outs = microbatch_loop(lambda c, x: (c + loss(w, x), x.sum()), 0.0, x, num_microbatches=2)
        y = fori_loop(3, lambda i, y: named_computation(layer, name="h")(w, y) + i, x)
        return total, outs, y

    module = module_of(run, W, X)
    loops = ir.ops(ir.symbol_table(module)["main"], ir.For)
    assert [loop.trip_count for loop in loops] == [2, 3]


@pytest.mark.parametrize("axis", [0, 1])
def test_microbatches_are_cut_along_any_dim(axis):
    x = jnp.arange(24.0).reshape(4, 6)
    _, pieces = microbatch_loop(lambda c, x: (c, x), 0.0, x, num_microbatches=2, axis=axis)
    assert jnp.array_equal(pieces, jnp.stack(jnp.split(x, 2, axis)))


def test_a_loop_inside_of_a_microbatch_is_unrolled():
    def deep(w, x):
        x, _ = jax.lax.scan(lambda x, _: (named_computation(layer, name="f")(w, x), None), x, None, length=3)
        return (x * x).sum()

    module = module_of(lambda w, x: accumulate_gradients(deep, 2)(w, x), W, jnp.ones((8, 4)))
    assert names_in(module).count('"f"') == 3
    assert names_in(module).count('"f"(1)') == 3


def test_a_loop_of_unknown_length_is_refused_with_its_line():
    def endless(w, x):
        return jax.lax.while_loop(
            lambda x: x.sum() < 10, lambda x: named_computation(layer, name="f")(w, x), x
        )

    with pytest.raises(PlacementError, match="number of iterations is not a constant at .*test_names.py"):
        module_of(endless, W, X)


def test_indivisible_batches_are_named_by_path():
    with pytest.raises(SignatureError, match="a batch cannot be split into 3 equal microbatches") as e:
        accumulate_gradients(lambda w, b: b["a"].sum(), 3)(W, {"a": jnp.ones((4, 2)), "c": jnp.ones(())})
    assert "b['a'] is float32[4,2]: dim 0 has 4 rows" in str(e.value)
    assert "b['c']" in str(e.value)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    def mean_loss(w, x):
        return (layer(w, x) ** 2).mean()

    x = jax.random.normal(jax.random.key(0), (8, 4))
    got = accumulate_gradients(mean_loss, 4)(W, x)
    want = jax.value_and_grad(mean_loss)(W, x)
    assert jnp.allclose(got[0], want[0]) and jnp.allclose(got[1], want[1], atol=1e-6)


def test_aux_of_every_microbatch_is_stacked():
    def with_aux(w, x):
        return (layer(w, x) ** 2).mean(), x.sum()

    (value, aux), _ = accumulate_gradients(with_aux, 4, has_aux=True)(W, jnp.ones((8, 4)))
    assert value.shape == () and aux.shape == (4,)


class Scaling:
    """Equal to every other one, as modules are that compare by their settings."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    method = __call__

    def __eq__(self, other):
        return isinstance(other, Scaling)

    def __hash__(self):
        return 0


class Slotted:
    """Nothing can refer to it weakly."""

    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def method(self, x):
        return x * self.factor


@pytest.mark.parametrize(
    "function_of",
    (
        lambda scaling: scaling,
        lambda scaling: scaling.method,
        lambda scaling: functools.partial(Scaling.method, scaling),
        lambda scaling: Slotted(scaling.factor).method,
    ),
    ids=("object", "method", "partial", "slots"),
)
def test_calls_of_functions_that_end_and_of_objects_that_are_equal(function_of):
    """A method is a new object at each access, and equal objects may compute other values."""

    def step(x):
        scaling = Scaling(2)
        function_of(scaling)
        call(function_of(scaling), call_counter=0)
        x = call(function_of(scaling), call_counter=1)(x)
        return call(function_of(Scaling(3)), call_counter=2)(x)

    assert (jax.jit(step)(X) == 6).all()


def test_calls_of_one_method_are_calls_of_one_function():
    scaling = Scaling(2)

    def step(x):
        return call(scaling.method, call_counter=1)(call(scaling.method, call_counter=0)(x))

    assert len(list(ir.funcs(module_of(step, X)))) == 2


def by_count(x, n):
    return fori_loop(n, lambda i, x: named_computation(lambda x: x + 1, name="f")(x), x)


def by_scan(x, n):
    return jax.lax.scan(lambda x, _: (named_computation(lambda x: x + 1, name="f")(x), None), x, length=n)[0]


def by_condition(x, n):
    body = named_computation(lambda x: x + 1, name="f")
    end = 1 if n else -2
    return jax.lax.while_loop(lambda c: c[0] < end, lambda c: (c[0] + 1, body(c[1])), (0, x))[1]


@pytest.mark.parametrize("loop", (by_count, by_scan, by_condition))
def test_a_loop_of_no_iterations_runs_no_names(loop):
    assert (jax.jit(loop, static_argnums=1)(X, 0) == X).all()
    assert names_in(module_of(lambda x: loop(x, 0), X)) == []
    assert live_names(jax.make_jaxpr(lambda x: loop(x, 0))(X).jaxpr) == set()
    assert live_names(jax.make_jaxpr(lambda x: loop(x, 1))(X).jaxpr) == {"f"}


@pytest.mark.parametrize(
    ("goes_on", "start", "step"),
    [(jax.lax.lt, 1, 1), (jax.lax.lt, 0, 2), (jax.lax.le, 0, 1), (jax.lax.ne, 0, 1)],
)
def test_a_loop_that_does_not_count_from_zero_by_one_is_refused(goes_on, start, step):
    """The number of its iterations would be another one."""

    def counting(x):
        body = named_computation(lambda x: x * 2, name="f")
        _, x = jax.lax.while_loop(lambda c: goes_on(c[0], 4), lambda c: (c[0] + step, body(c[1])), (start, x))
        return x

    with pytest.raises(PlacementError, match="number of iterations is not a constant"):
        module_of(counting, X)
