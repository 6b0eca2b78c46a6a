"""Names in branches, loops and functions of operations run where they are assigned, or are reported."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpmd
from examples.workloads.models import normal
from mpmd import ir
from mpmd.errors import ConfigError, PassError, PlacementError

pytestmark = pytest.mark.usefixtures("plain_xla")

W, X = jax.device_put((normal(0, 4, 8, 8), normal(1, 4, 8, scale=1.0)))


def config(**assignment):
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    return mpmd.make_config(topology, assignment or {"s0": "m0", "s1": "m1"}, backend="xla")


def named(stage, fn=lambda w, c: jnp.tanh(c @ w)):
    return mpmd.named_computation(fn, name=f"s{stage}")


s0, s1 = named(0), named(1)


def square(x):
    return jnp.mean(x**2)


def constant_index(w, x):
    return square(lax.switch(1, [s0, s1], w[1], lax.switch(0, [s0, s1], w[0], x)))


def counter_of_a_scan(w, x):
    def body(c, layer):
        return lax.switch(layer[0] // 2, [s0, s1], layer[1], c), None

    return square(lax.scan(body, x, (jnp.arange(4), w))[0])


def rematerialized_scan(w, x):
    @jax.checkpoint
    def body(c, layer):
        return lax.cond(layer[0] < 2, s0, s1, layer[1], c), None

    return square(lax.scan(body, x, (jnp.arange(4), w), unroll=2)[0])


def table_in_a_loop(w, x):
    table = jnp.array([0, 0, 1, 1])
    return square(lax.fori_loop(0, 4, lambda i, c: lax.switch(table[i], [s0, s1], w[i], c), x))


def branch_in_a_branch(w, x):
    def body(c, layer):
        i, w = layer
        return lax.cond(i < 2, s0, lambda w, c: lax.cond(i < 3, s1, lambda w, c: c + 1.0, w, c), w, c), None

    return square(lax.scan(body, x, (jnp.arange(4), w), reverse=True)[0])


def batched_condition(w, x):
    return square(jax.vmap(lambda row: lax.cond(row.sum() > 0, s0, s1, w[0], row))(x))


def branch_within_a_name(w, x):
    outer = named(0, lambda w, x: lax.cond(x.sum() < 3.0, s0, lambda w, x: x, w, x))
    return square(s1(w[1], outer(w[0], x)))


def loops_and_functions(w, x):
    mapped = lax.map(lambda row: s0(w[0], row[None])[0], x)
    return square(jax.jit(lambda x: jax.jit(s1)(w[1], x))(lax.associative_scan(jnp.add, mapped)))


def own_gradient(w, x):
    @jax.custom_vjp
    def f(w, x):
        return s0(w, x)

    f.defvjp(lambda w, x: (s0(w, x), (w, x)), lambda kept, g: jax.vjp(s1, *kept)[1](g))
    return square(f(w[0], x))


KEPT = [
    constant_index, counter_of_a_scan, rematerialized_scan, table_in_a_loop, branch_in_a_branch,
    batched_condition, branch_within_a_name, loops_and_functions, own_gradient,
]  # fmt: skip
STEPS = {
    "microbatches": lambda loss: mpmd.accumulate_gradients(loss, 2),
    "gradient": lambda loss: jax.value_and_grad(loss),
}


def origins(lowered):
    """The names in the partitioned program, with their meshes."""
    module = lowered.partitioned.module
    calls = [op for f in ir.funcs(module) for op in ir.walk(f, ir.FragmentCall)]
    return {(origin.name, call.mesh) for call in calls for origin in call.origins}


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    ("loss", "step"),
    [*((loss, "microbatches") for loss in KEPT), (counter_of_a_scan, "gradient"), (own_gradient, "gradient")],
)
def test_a_name_runs_on_its_mesh_wherever_it_is_called(loss, step):
    step = STEPS[step](loss)
    jitted = mpmd.jit(lambda w, x: step(w, x), config())
    lowered = jitted.lower(W, X)
    assert origins(lowered) == {("s0", "m0"), ("s1", "m1")}
    assert not [text for text in lowered.warnings if "runs" in text]
    for got, want in zip(jax.tree.leaves(lowered.compile()(W, X)), jax.tree.leaves(jax.jit(step)(W, X))):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6)


def test_the_backward_pass_of_a_scan_is_transposed_once():
    def loss(w, x):
        return square(lax.scan(lambda c, w: (s0(w, c), None), x, w)[0])

    lowered = mpmd.jit(jax.value_and_grad(loss), config(s0="m0")).lower(W, X)
    module = lowered.partitioned.module
    found = {o for f in ir.funcs(module) for op in ir.walk(f, ir.FragmentCall) for o in op.origins}
    assert {origin.transpose_count for origin in found} == {0, 1}


def condition_of_a_value(w, x):
    return square(lax.cond(x.sum() > 0, s1, lambda w, x: x, w[1], s0(w[0], x)))


def index_of_a_value(w, x):
    return square(lax.switch(x[0, 0].astype(int), [lambda w, x: x, s1, s0], w[1], x))


def tensor_in_a_branch(w, x):
    return square(s0(w[0], lax.cond(x.sum() > 0, lambda x: mpmd.named_tensor(x, "s1"), lambda x: x, x)))


def function_of_a_reduction(w, x):
    add = mpmd.named_computation(lambda a, b: a * b + 1.0, name="s1")
    return square(s0(w[0], x)) + lax.stop_gradient(lax.reduce(x, jnp.float32(0), add, (0, 1)))


def another_mesh_within_a_name(w, x):
    outer = named(0, lambda w, x: lax.cond(x.sum() < 3.0, s1, lambda w, x: x, w, x))
    return square(outer(w[0], x))


REFUSED = {
    condition_of_a_value: r"^named computation 's1' is in the true branch of a lax\.cond whose condition is "
    rf"not a constant, {__file__}:\d+, in condition_of_a_value",
    index_of_a_value: r"(?s)^2 errors:\n  1\. named computation 's1' is in branch 1 of 3 .* a lax\.switch "
    r"whose index is not a constant, .*2\. named computation 's0' is in branch 2 of 3 ",
    tensor_in_a_branch: r"^named tensor 's1' is in the true branch of a lax\.cond",
    function_of_a_reduction: r"^named computation 's1' is in the function of a stablehlo\.reduce, where it "
    rf"cannot have a mesh, {__file__}:\d+, in function_of_a_reduction",
    another_mesh_within_a_name: r"NamedComputation 's1' is nested in a NamedComputation 's0' which has a",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda f: f.__name__)
def test_a_name_that_cannot_have_a_mesh_is_refused_with_its_place(loss):
    step = mpmd.accumulate_gradients(loss, 2)
    with pytest.raises(PassError, match=REFUSED[loss]):
        mpmd.jit(lambda w, x: step(w, x), config()).lower(W, X)


def test_a_loop_of_unknown_length_is_refused_with_the_names_in_it():
    def step(w, x):
        return lax.while_loop(lambda c: c.sum() < 3.0, lambda c: jnp.abs(s1(w[0], c)) + 1.0, s0(w[0], x))

    with pytest.raises(PlacementError, match=r"(?s)number of iterations is not a constant at .*'s1'"):
        mpmd.jit(step, config()).lower(W, X)


def test_such_a_loop_may_be_within_a_name():
    def step(w, x):
        loop = named(
            0, lambda w, x: lax.while_loop(lambda c: c.sum() < 3.0, lambda c: abs(s0(w, c)) + 1.0, x)
        )
        return s1(w[0], loop(w[0], x))

    jitted = mpmd.jit(step, config())
    assert origins(jitted.lower(W, X)) == {("s0", "m0"), ("s1", "m1")}
    np.testing.assert_allclose(np.asarray(jitted(W, X)), jax.jit(step)(W, X), rtol=1e-5)


def unused_result(w, x):
    s1(w[1], x)
    return square(s0(w[0], x))


def branch_never_taken(w, x):
    return square(lax.switch(0, [s0, s1], w[0], x))


def shape_only(w, x):
    return square(s0(w[0], x)) + jax.eval_shape(s1, w[1], x).shape[0]


def computes_nothing(w, x):
    return square(s0(w[0], mpmd.named_computation(lambda x: x, name="s1")(x)))


@pytest.mark.parametrize("loss", [unused_result, branch_never_taken, shape_only, computes_nothing])
def test_dead_code_is_warned_of_once(loss):
    jitted = mpmd.jit(lambda w, x: mpmd.accumulate_gradients(loss, 2)(w, x), config())
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        lowered = jitted.lower(W, X)
    want = [
        "'s1' is assigned to mesh 'm1' and is called, but nothing of it runs: no result of the step depends "
        "on what it computes",
        "mesh 'm1' of the topology runs nothing in this step",
    ]
    assert lowered.warnings == want
    assert [str(w.message) for w in issued] == want
    assert {w.filename for w in issued} == {__file__}
    assert jitted.lower(W, X).warnings == want  # JAX does not trace it again


def test_a_name_that_other_static_arguments_call_is_not_warned_of():
    def step(w, x, train):
        return square(s1(w[1], s0(w[0], x)) if train else s0(w[0], x))

    jitted = mpmd.jit(step, config(), static_argnums=2)
    assert jitted.lower(W, X, True).warnings == []
    assert jitted.lower(W, X, False).warnings == ["mesh 'm1' of the topology runs nothing in this step"]


def test_a_live_name_that_jax_does_not_lower_is_refused(monkeypatch):
    """Stands for operations whose lowering holds no calls."""
    from mpmd.tracing import expand

    monkeypatch.setattr(
        expand.Expansion, "make_named_computation", lambda self, call, origin: self._inline_inside(call)
    )
    with pytest.raises(
        ConfigError, match=r"'s0' is assigned to mesh 'm0', and the results depend on it, but"
    ):
        mpmd.jit(lambda w, x: s1(w[1], s0(w[0], x)), config()).lower(W, X)
