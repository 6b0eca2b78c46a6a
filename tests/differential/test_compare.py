"""A step compared with XLA, fragment by fragment: what agrees, and mistakes that are put in and found."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.compile.backends.native_cpu.math import elementary
from mpmd.compile.backends.native_cpu.math.elementary import tanh
from mpmd.compile.passes.simplify import algebra
from mpmd.compile.passes.simplify.algebra import elementwise

pytestmark = pytest.mark.usefixtures("plain_xla")

RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.standard_normal((8, 8), "f4"), "b": RNG.standard_normal((8, 4), "f4")}
X = RNG.standard_normal((8, 8), "f4")


def lower(w, x):
    return jnp.tanh(x @ w)


def upper(w, h):
    y = jax.nn.softmax(h @ w)
    return jnp.mean(y * y)


def loss(params, x):
    h = mpmd.named_computation(lower, name="lower")(params["a"], x)
    return mpmd.named_computation(upper, name="upper")(params["b"], h)


def step(params, x):
    value, grads = mpmd.accumulate_gradients(loss, 2)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def compiled(fn=step, each=1, options=None, backend="native", **more):
    topology = mpmd.make_topology({"m0": {"x": each}, "m1": {"x": each}})
    shardings = {"in_shardings": (None, P("x"))} if each > 1 else {}
    options = options or mpmd.PipelineOptions()
    config = mpmd.make_config(
        topology, {"lower": "m0", "upper": "m1"}, options=options, backend=backend, **shardings
    )
    return mpmd.jit(fn, config, **more).compiled(PARAMS, X)


def upper_alone(params, x):
    h = mpmd.named_computation(lambda x: x * 2, name="lower")(x)
    return mpmd.named_computation(upper, name="upper")(params["b"], h)


def line_of(function, text):
    """`file:line` of a line of a function."""
    lines, first = inspect.getsourcelines(function)
    return f"test_compare.py:{first + next(k for k, line in enumerate(lines) if text in line)}"


@pytest.fixture
def wrong_rule(monkeypatch):
    """A rule of the simplifier that takes the square of a value for itself."""

    def square(site):
        a, b = site.operands
        return a if a is b else None

    monkeypatch.setitem(elementwise.RULES, "multiply", (square, *elementwise.RULES["multiply"]))
    algebra.table.cache_clear()
    yield
    algebra.table.cache_clear()


@pytest.fixture
def wrong_kernel(monkeypatch):
    """Code for tanh that gives -tanh."""
    monkeypatch.setitem(elementary.UNARY, "tanh", lambda b, x: b.op(f"fneg {tanh(b, x).typed}", x.type))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("each", (1, 2))
def test_a_step_that_agrees(each):
    run = compiled(each=each, donate_argnums=0)
    params = jax.device_put(PARAMS)
    report = run.compare(params, X)
    assert report, str(report)
    assert report.fragments == len(run.executables) - len(report.skipped)
    assert str(report).startswith(f"all {report.fragments} fragments agree with XLA, in {report.calls} calls")
    assert not params["a"].is_deleted(), "a comparison consumes nothing"
    again = jax.tree.leaves(run(jax.tree.map(jnp.copy, PARAMS), X))
    for got, want in zip(jax.tree.leaves(report.results), again, strict=True):
        assert (np.asarray(got) == np.asarray(want)).all()


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("each", (1, 2))
def test_a_wrong_rule_is_found_in_its_pass_and_line(wrong_rule, each):
    report = compiled(each=each).compare(PARAMS, X)
    assert not report
    (found,) = report.differences
    assert found.mesh == "m1" and found.calls == 2 and "microbatch 0" in found.task
    assert {result.wrong for result in found.results} == {"native"}
    assert "stablehlo.multiply" in found.divergence.operation
    assert line_of(upper, "y * y") in found.place
    assert found.divergence.without == "hlo-algebraic-simplifier"
    assert "--mpmd_disable_passes=hlo-algebraic-simplifier" in str(report)


@pytest.mark.slow
def test_a_wrong_kernel_is_found_in_its_line(wrong_kernel):
    report = compiled().compare(PARAMS, X)
    (found,) = report.differences
    assert found.mesh == "m0" and "stablehlo.tanh" in found.divergence.operation
    assert line_of(lower, "tanh") in found.place and found.divergence.kernel
    assert found.divergence.without == "" and "it is in the code of the kernel" in str(report)
    (result,) = found.results
    assert result.difference.got == pytest.approx(-result.difference.expected, rel=1e-3)
    assert result.exact == pytest.approx(result.difference.expected, rel=1e-3)


def test_the_option_compares_the_first_call(wrong_kernel, capsys):
    run = compiled(options=mpmd.PipelineOptions(compare="xla"))
    with pytest.warns(UserWarning, match="1 of . fragments differ from XLA beyond rounding") as warned:
        run(PARAMS, X)
        run(PARAMS, X)
    assert len(warned) == 1
    agreeing = compiled(upper_alone, options=mpmd.PipelineOptions(compare="xla"))
    assert np.isfinite(float(agreeing(PARAMS, X)))
    assert "fragments agree with XLA" in capsys.readouterr().err


def test_callbacks_are_done_once():
    seen = []

    def with_callback(params, x):
        def lower_seen(w, x):
            h = lower(w, x)
            jax.debug.callback(lambda total: seen.append(float(total)), h.sum())
            return h

        h = mpmd.named_computation(lower_seen, name="lower")(params["a"], x)
        return mpmd.named_computation(upper, name="upper")(params["b"], h)

    report = compiled(with_callback).compare(PARAMS, X)
    jax.effects_barrier()
    assert len(seen) == 1
    assert report and "call back to Python, which would happen twice" in str(report)


def test_a_step_that_xla_compiles_has_nothing_to_compare():
    report = compiled(backend="xla").compare(PARAMS, X)
    assert report.fragments == 0
    assert "nothing was compared" in str(report) and "since XLA compiles them" in str(report)


def test_sums_that_vanish_are_rounding():
    """Two errors of one size: in f64 the values are far smaller than either."""

    def vanishing(params, x):
        h = mpmd.named_computation(lambda w, x: 1e3 * (x @ w), name="lower")(params["a"], x)
        return mpmd.named_computation(lambda h: (jax.nn.softmax(h / 1e3) - 0.125).sum(-1), name="upper")(h)

    report = compiled(vanishing).compare(PARAMS, X)
    assert report, str(report)
