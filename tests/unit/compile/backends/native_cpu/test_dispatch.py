"""Who runs a program, and on how many threads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.dispatch import is_dispatched, is_small, seconds, threads_for
from mpmd.compile.backends.native_cpu.native_program import Alone, Run, While
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from tests.support.native_fragments import compiled, fragment_of, run

RNG = np.random.default_rng(0)


def costs(flops: float = 0.0, moved: float = 0.0, transcendentals: float = 0.0) -> dict[str, float]:
    return {"flops": flops, "bytes accessed": moved, "transcendentals": transcendentals}


def test_every_kind_of_work_counts():
    one = seconds(costs(flops=1e6))
    assert seconds(costs(flops=2e6)) == pytest.approx(2 * one)
    both = seconds(costs(flops=1e6, moved=1e6, transcendentals=1e6))
    assert both == pytest.approx(one + seconds(costs(moved=1e6)) + seconds(costs(transcendentals=1e6)))
    assert seconds(costs(transcendentals=1e6)) > one


def test_small_programs_run_on_one_thread():
    assert threads_for(costs(flops=1e5), 8) == 1
    assert threads_for(costs(flops=1e9), 8) == 8
    assert threads_for(costs(flops=1e9), 0) == 1


def test_handing_over_is_for_long_programs_and_sooner_where_others_could_work():
    middle = costs(flops=2e7)
    assert is_dispatched(middle, meshes=4) and not is_dispatched(middle, meshes=1)
    for meshes in (0, 1, 4):
        assert is_dispatched(costs(flops=1e9), meshes)
        assert not is_dispatched(costs(moved=1e5), meshes)


# -- steps that are worth one thread
def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def recurrent(x, w, h):
    """A loop of small steps."""
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row),) * 2, h, x)[1]


def small_between_large(x, w):
    """Large work, small steps that each need the one before, and large work that needs the last."""
    y = jnp.tanh(x @ w)
    row = jax.nn.softmax(y[0])
    for _ in range(3):
        row = jax.nn.softmax(jnp.cumsum(row)[::-1])
    return (y + row) @ w, row


def chosen(x, n):
    """A branch of small steps, and a large one."""
    small = jax.lax.switch(n, [lambda r: r[::-1] * 2, lambda r: jnp.sort(r) + r.sum()], x[0])
    return x @ x.T + small[:, None], small


# The recurrence contracts: ‖w‖ is 0.95.  With ‖w‖ = 7.6 it is chaotic: 1e-7 in `h` becomes 1e-3 in 30 steps.
CASES = {
    "recurrent": (recurrent, (normal(30, 4, 16), normal(16, 16) / 8, normal(4, 16))),
    "small between large": (small_between_large, (normal(200, 96), normal(96, 96))),
    "chosen": (chosen, (normal(128, 128), np.int32(1))),
}


@pytest.fixture(scope="module", params=[2, 3])
def pool(request):
    made = WorkerPool(request.param)
    yield made
    made.close()


@pytest.mark.optimized
@pytest.mark.parametrize("name", sorted(CASES))
def test_numbers_do_not_depend_on_threads(name, pool):
    function, arguments = CASES[name]
    fragment = fragment_of(function, *arguments)
    made = compiled(fragment)
    wanted = run(fragment, list(arguments), made)
    for got, expected in zip(wanted, jax.tree.leaves(jax.jit(function)(*arguments)), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-4, rtol=2e-4)
    for _ in range(10):
        for got, alone in zip(run(fragment, list(arguments), made, pool), wanted, strict=True):
            np.testing.assert_array_equal(got, alone)


def test_a_loop_of_small_steps_is_the_first_threads():
    steps = compiled(fragment_of(recurrent, *CASES["recurrent"][1])).program.threaded.steps
    loops = [inner for step in steps if isinstance(step, Alone) for inner in step.steps]
    assert any(isinstance(inner, While) for inner in loops)
    assert not any(isinstance(step, While) for step in steps)
    large = compiled(fragment_of(recurrent, normal(4, 200, 256), normal(256, 256), normal(200, 256)))
    assert any(isinstance(step, While) for step in large.program.threaded.steps)


def test_small_steps_wait_for_large_ones_and_not_for_each_other():
    made = compiled(fragment_of(small_between_large, *CASES["small between large"][1]), poison=False)
    steps = made.program.threaded.steps
    chains = [step for step in steps if isinstance(step, Alone) and len(step.steps) > 1]
    assert len(chains) == 1 and chains[0].waits
    after = steps[steps.index(chains[0]) + 1]
    assert isinstance(after, Run) and after.waits
    assert [is_small(thunk) for thunk in made.thunks].count(False) == len(steps) - 1
