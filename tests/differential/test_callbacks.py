"""Stages that call back to Python."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from examples.workloads.models import chain, dense_params, regression_batch
from mpmd.errors import FragmentError
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")


def on_host(function):
    """`function` of NumPy arrays as a part of a stage; its gradient is that of the identity."""

    @jax.custom_vjp
    def call(x):
        return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    call.defvjp(lambda x: (call(x), None), lambda _, g: (g,))
    return call


def pipelined(fn, stages=2, **jit_options):
    topology = mpmd.make_topology({f"m{s}": 1 for s in range(stages)})
    return mpmd.jit(
        fn, mpmd.make_config(topology, {f"stage{s}": f"m{s}" for s in range(stages)}), **jit_options
    )


def test_each_stage_calls_its_own_function():
    halve, round_off = on_host(lambda x: np.asarray(x) / 2), on_host(lambda x: np.round(x, 1))
    layers = iter([halve, round_off] * 10)

    def layer(p, x):
        return jnp.tanh(next(layers)(x @ p["w"]) + p["b"])

    params = {f"s{s}": dense_params(s) for s in range(2)}

    def step(params, x, y):
        nonlocal layers
        layers = iter([halve, round_off] * 10)
        return mpmd.accumulate_gradients(chain(2, layer), num_microbatches=4)(params, x, y)

    got = pipelined(step)(params, *regression_batch())
    assert relative_difference(got, jax.jit(step)(params, *regression_batch())) <= 1e-5


def test_meshes_call_back_at_the_same_time():
    """XLA runs such a fragment in the thread that calls it: each mesh then has a thread of its own."""
    both = threading.Barrier(2, timeout=60)

    def meet(x):
        both.wait()  # passes only when both meshes are in their calls
        return np.asarray(x)

    def step(x):
        stages = [mpmd.named_computation(on_host(meet), name=f"stage{s}") for s in range(2)]
        return stages[0](x), stages[1](x)

    compiled = pipelined(step).lower(jnp.ones(4)).compile()
    assert [e.asynchronous for e in compiled.executables.values()] == [False, False]
    for result in compiled(jnp.ones(4)):
        np.testing.assert_array_equal(result, np.ones(4))
    compiled.close()


def test_an_error_in_a_callback_names_the_fragment():
    def fail(x):
        raise ValueError("not today")

    def step(x):
        x = mpmd.named_computation(lambda x: 2 * x, name="stage0")(x)
        return mpmd.named_computation(on_host(fail), name="stage1")(x)

    compiled = pipelined(step).lower(jnp.ones(4)).compile(runtime=mpmd.RuntimeOptions(blocking=True))
    with pytest.raises(FragmentError, match=r"^fragment 'p1_stage1.*' failed on mesh 'm1', step 0") as caught:
        compiled(jnp.ones(4))
    assert "not today" in str(caught.value)
    compiled.close()


def test_what_a_stage_prints_is_printed_for_every_microbatch():
    seen = []

    def step(x):
        def stage(x):
            jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
            return 2 * x

        def body(total, x):
            return total + mpmd.named_computation(stage, name="stage0")(x).sum(), None

        return mpmd.microbatch_loop(body, jnp.float32(0), x, num_microbatches=4)[0]

    compiled = pipelined(step, stages=1).lower(jnp.arange(8.0)).compile()
    assert float(compiled(jnp.arange(8.0))) == 56
    jax.effects_barrier()
    assert sorted(seen) == [1, 5, 9, 13]
    compiled.close()
