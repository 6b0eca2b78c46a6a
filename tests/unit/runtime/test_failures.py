from __future__ import annotations

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from mpmd.errors import FragmentError
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from mpmd.runtime.run.observe import count_values
from tests.support.pipeline_graphs import (
    BODIES,
    FailedArray,
    Plain,
    X,
    chain,
    chain_executor,
    devices,
    good,
    random_inputs,
    sequential,
)

ISSUES = ("one-thread", "thread-per-mesh")


def raises_at(call: int, error: BaseException):
    """A body that raises when it is called for the n-th time, before anything is computed."""
    count = iter(range(1000))

    def body(x):
        if next(count) == call:
            raise error
        return (x + 1,)

    return body


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("name", ["f", "g", "h"])
@pytest.mark.parametrize(
    "error", [ValueError("injected"), MemoryError("injected"), ZeroDivisionError("injected")]
)
def test_a_fragment_that_raises_is_named_and_the_next_step_works(issue, name, error):
    with chain_executor({name: raises_at(1, error)}, issue=issue) as executor:
        executor.run([X])
        where = {
            "f": "mesh 'm0', F stage 0 microbatch 2",
            "g": "mesh 'm0', B stage 0 microbatch 2",
            "h": "mesh 'm1', stage 1",
        }[name]
        with pytest.raises(FragmentError) as caught:
            executor.run([X])
        first = f"fragment {name!r} failed on {where}, step 1: {type(error).__name__}: injected"
        assert str(caught.value).splitlines()[0] == first
        assert caught.value.__cause__ is error
        (z,) = executor.run([X])
        np.testing.assert_array_equal(np.asarray(z), X + 3)


def test_the_error_shows_the_label_and_what_is_gone():
    def consume_and_raise(x):
        x.delete()
        raise ValueError("out of luck")

    state = jax.device_put(X, jax.devices()[0])
    with (
        chain_executor({"f": consume_and_raise}, chain(donated=True)) as executor,
        pytest.raises(FragmentError) as caught,
    ):
        executor.run([state])
    assert str(caught.value).splitlines()[1:] == [
        "  it is: model.py:7 (f)",
        "  consumed and gone: state.x; continue from a checkpoint",
    ]
    with (
        chain_executor({"f": raises_at(0, ValueError())}, chain(donated=True)) as executor,
        pytest.raises(
            FragmentError,
            match=r"ValueError: no message\n.*\n  no argument was consumed: the step can be rep",
        ),
    ):
        executor.run([X])


def failing_on_the_device(x):
    def refuse(_):
        raise ArithmeticError("injected on the device")

    return (jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x),)


@pytest.mark.parametrize("issue", ISSUES)
def test_a_failure_on_the_device_is_named_at_the_next_chance(issue):
    """What reads a failed array fails too; the first failure is the one that is named."""
    failing, arrived = [True], []

    def f(x):
        return (FailedArray(x, "INTERNAL: injected", arrived) if failing else x + 1,)

    def g(x):
        if not isinstance(x, FailedArray):
            return (x + 1,)
        return (FailedArray(x.like, f"Error dispatching computation: {x.message}", arrived),)

    b = GraphBuilder()
    (y,) = b.call("f", "m0", [b.input("m0", "x")], stage=0, microbatch=2, phase="F")
    b.output(*b.call("g", "m0", [y], stage=0, microbatch=2, phase="B"))
    b.output(*b.call("h", "m1", [b.transfer(b.inputs[0].value, "m1")]))
    with chain_executor({"f": f, "g": g}, b.graph(), issue=issue, run_ahead=8) as executor:
        first = r"^fragment 'f' failed on mesh 'm0', F stage 0 microbatch 2, step 0: JaxRuntimeError: INT"
        executor.run([X])
        arrived.append(True)
        with pytest.raises(FragmentError, match=first) as caught:
            executor.run([X])
        assert str(caught.value).endswith(
            "the results of that step have no value; continue from a checkpoint"
        )
        failing.clear()
        z, _ = executor.run([X])
        executor.synchronize()
        np.testing.assert_array_equal(np.asarray(z), X + 2)


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_failing_callback_is_named_and_not_what_read_its_result(issue, blocking):
    bodies = {"f": jax.jit(good), "g": jax.jit(failing_on_the_device), "h": jax.jit(good)}
    with chain_executor(bodies, blocking=blocking, issue=issue) as executor:
        first = r"^fragment 'g' failed on mesh 'm0', B stage 0 microbatch 2, step 0: JaxRuntimeError"
        with pytest.raises(FragmentError, match=first) as caught:
            executor.run([X])
            executor.synchronize()
        assert "injected on the device" in str(caught.value)
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize("issue", ISSUES)
def test_debug_nans_names_the_fragment_that_made_the_nan(issue):
    def divide(x):
        return ((x - x) / (x - x),)

    bodies = {"g": jax.jit(divide), "f": jax.jit(good), "h": jax.jit(good)}
    with chain_executor(bodies, issue=issue) as executor:
        assert np.isnan(np.asarray(executor.run([X])[0])).all()
    with chain_executor(bodies, issue=issue, debug_nans=True) as executor:
        with pytest.raises(FragmentError) as caught:
            executor.run([X])
        assert str(caught.value).splitlines()[0] == (
            "fragment 'g' failed on mesh 'm0', B stage 0 microbatch 2, step 0: FloatingPointError: "
            "result 0 of 1 holds 8 NaN values"
        )


def test_debug_nans_sees_bfloat16_and_shards():
    assert count_values(jnp.array([1, jnp.nan, jnp.nan], jnp.bfloat16), np.isnan) == 2
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    for spec in (jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()):
        array = jax.device_put(np.array([np.nan, 1, 2, np.nan]), jax.sharding.NamedSharding(mesh, spec))
        assert count_values(array, np.isnan) == 2
    assert count_values(jnp.arange(3), np.isnan) == 0


@pytest.mark.parametrize("issue", ISSUES)
def test_an_interrupt_ends_the_step_at_once(issue):
    """Every call takes half a second, and the step is interrupted in one of the first."""
    graph = one_f_one_b(2, 4)
    slow, calls = [True], []

    def sleepy(function):
        jitted = jax.jit(function)

        def body(*arrays):
            calls.append(1)
            end = time.monotonic() + 0.5 * bool(slow)
            while time.monotonic() < end:
                time.sleep(0.01)
            return jitted(*arrays)

        return body

    program = linearize(graph)
    executables = {(m, n): Plain(n, sleepy(BODIES[n][0])) for m, n in program.executables}
    with Executor(program, executables, devices(2), RuntimeOptions(issue=issue)) as executor:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            executor.run(random_inputs(graph))
        interrupted = len(calls)
        slow.clear()
        got = executor.run(random_inputs(graph))
        assert interrupted < len(calls) - interrupted
        for want, array in zip(sequential(graph, random_inputs(graph)), got, strict=True):
            np.testing.assert_allclose(np.asarray(array), want, rtol=1e-5, atol=1e-6)


def test_many_faults_each_end_in_one_error_and_a_working_next_step():
    graph = one_f_one_b(3, 3)
    program = linearize(graph)
    inputs, want = random_inputs(graph), sequential(graph, random_inputs(graph))
    rng = np.random.default_rng(0)
    calls = {pair: Compiled_or_fault(pair[1]) for pair in program.executables}
    for issue in ISSUES:
        with Executor(program, calls, devices(3), RuntimeOptions(issue=issue)) as executor:
            for _ in range(25):
                pair = program.executables[rng.integers(len(program.executables))]
                calls[pair].fail_at = int(rng.integers(1 if pair[1] == "update" else 3))
                with pytest.raises(
                    FragmentError, match=rf"^fragment '{pair[1]}' failed on mesh '{pair[0]}', .*injected"
                ):
                    executor.run(inputs)
                for array, value in zip(executor.run(inputs), want, strict=True):
                    np.testing.assert_allclose(np.asarray(array), value, rtol=1e-5, atol=1e-6)


class Compiled_or_fault:
    """Raises at one call of the next step, if asked to."""

    def __init__(self, name: str) -> None:
        self.name, self.fail_at = name, None
        self._function = jax.jit(BODIES[name][0])

    def __call__(self, *arrays):
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise RuntimeError("injected")
        return self._function(*arrays)


def test_what_cannot_be_watched_is_mentioned():
    """f's only result is consumed by g: a failure on the device shows first in g."""
    b = GraphBuilder()
    (y,) = b.call("f", "m0", [b.input("m0", "x")], phase="F")
    b.output(*b.call("g", "m0", [y], donated=(0,)))

    def g(x):
        return (FailedArray(x, "INTERNAL: injected"),)

    with (
        chain_executor({"g": g}, b.graph(), blocking=True) as executor,
        pytest.raises(FragmentError, match=r"\n  or in its inputs: f cannot be watched"),
    ):
        executor.run([X])
    with chain_executor({"g": raises_at(0, ValueError("no"))}, b.graph(), blocking=True) as executor:
        with pytest.raises(FragmentError) as caught:
            executor.run([X])
        assert "watched" not in str(caught.value)


def test_an_interrupt_does_not_wait_for_a_call_that_cannot_be_stopped():
    """A call stays in a thread of its own until it is let go; the next step waits for it and is right."""
    let_go, waited_too_long = threading.Event(), []

    def f(x):
        if not let_go.is_set():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()  # once the step waits
            if not let_go.wait(60):
                waited_too_long.append(x)
        return (x + 1,)

    with chain_executor({"f": f}, issue="thread-per-mesh") as executor:
        with pytest.raises(KeyboardInterrupt):
            executor.run([X])
        let_go.set()
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(executor.run([X])[0]), X + 3)
    assert not waited_too_long
