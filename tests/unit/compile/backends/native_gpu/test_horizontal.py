"""Launches that become one: which may, which order stays, and that the kernel computes what they did."""

import dataclasses
import importlib.util
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.horizontal import MAX_POINTERS, launch_groups, side_by_side
from mpmd.compile.backends.native_gpu.launches import (
    CopyLaunch,
    KernelLaunch,
    LoopLaunch,
    ProductLaunch,
    launch_program,
)
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel
from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.driver import prepare_fragment
from tests.support.gpu_launches import run_program
from tests.support.native_fragments import fragment_of

SMALL = 1 << 20
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)


def kernel(body="(p0, p1):\n", size=64, **fields):
    """A kernel that reads its first argument and writes the second."""
    return PrintedKernel("loop", body, ("*fp32",) * 2, (True,) * 2, (0, 1), (size,) * 2,
                         frozenset([0]), frozenset([1]), 1, 4, **fields)  # fmt: skip


def launches(pairs, made, allocation=0):
    """Launches from one number to another: slices of 64 bytes."""
    places = [[Slice(allocation, 64 * number, 64) for number in pair] for pair in pairs]
    return [KernelLaunch(f"k{k}", made.name, tuple(p), 1, made.sizes) for k, p in enumerate(places)]


def groups(pairs, made=None, most=SMALL):
    made = made or kernel()
    steps = launches(pairs, made)
    found = launch_groups(steps, {made.name: made}, most)
    return [[steps.index(step) for step in group] for group in found]


def test_launches_join_where_no_memory_forbids_it():
    assert groups([(0, 1), (2, 3), (4, 5)]) == [[0, 1, 2]]
    assert groups([(0, 1), (1, 2), (3, 4)]) == [[0], [1, 2]], "the second reads a result of the first"
    assert groups([(0, 1), (2, 0), (3, 4)]) == [[0], [1, 2]], "the second writes over an operand of the first"
    assert groups([(0, 1), (2, 1)]) == [[0], [1]], "both write the same"
    assert groups([(0, 0), (1, 1)]) == [[0, 1]], "each in its place"
    assert groups([(0, 1), (1, 2), (2, 3)]) == [[0], [1], [2]]


def test_what_stays_alone():
    assert groups([(0, 1), (2, 3)], most=127) == [[0], [1]], "large ones gain nothing"
    assert groups([(0, 1), (2, 3)], kernel(flops=1.0)) == [[0], [1]], "products fill the device"
    many = groups([(2 * k, 2 * k + 1) for k in range(MAX_POINTERS)])
    assert [len(group) for group in many] == [MAX_POINTERS // 2] * 2
    different = [kernel(f"(p0, p1):\n    pass  # {k}\n") for k in range(20)]
    steps = [launches([(2 * k, 2 * k + 1)], each)[0] for k, each in enumerate(different)]
    found = launch_groups(steps, {each.name: each for each in different}, SMALL)
    assert [len(group) for group in found] == [8, 8, 4], "a kernel of a few others"
    wide = dataclasses.replace(kernel(), warps=8)
    steps = [*launches([(0, 1)], kernel()), *launches([(2, 3)], wide)]
    assert len(launch_groups(steps, {k.name: k for k in (kernel(), wide)}, SMALL)) == 2


def test_any_order_of_a_group_has_the_meaning_of_the_program():
    """Random launches and copies: each place holds the history of what was written to it."""
    joined, made = 0, kernel()
    for seed in range(60):
        dice = random.Random(seed)
        pairs = [(dice.randrange(12), dice.randrange(12)) for _ in range(20)]
        steps = launches(pairs, made)
        for k in dice.sample(range(len(steps)), 3):
            steps[k] = CopyLaunch(f"c{k}", *steps[k].arguments)
        found = launch_groups(steps, {made.name: made}, SMALL)
        joined += sum(len(group) > 1 for group in found)
        assert histories(steps) == histories([s for g in found for s in dice.sample(g, len(g))]), seed
    assert joined > 60


def histories(steps):
    memory = {}
    for step in steps:
        source, target = step.arguments if isinstance(step, KernelLaunch) else (step.source, step.target)
        memory[target.offset] = (step.name, memory.get(source.offset), memory.get(target.offset))
    return memory


def updates(*given):
    """Parameters, gradients: three kinds of updates, and what reads one of them."""
    half = len(given) // 2
    new = [jnp.sin(p) - 0.5 * g for p, g in zip(given[:half], given[half:])]
    return [*new, new[0] @ new[1]]


SHAPES = [(32, 32), (32, 32), (7,), (5, 3), (2048,), (16, 64)]


def update_arguments():
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES * 2]


def test_updates_of_all_parameters_are_one_launch(unpoisoned):
    count = len(SHAPES)
    fragment = fragment_of(updates, *update_arguments(), donated=tuple(range(count)))
    program = prepare_fragment(fragment, GpuTarget()).program
    kinds = [type(step) for step in program.steps]
    assert kinds == [KernelLaunch, ProductLaunch]
    first = program.steps[0]
    assert len(first.arguments) == 2 * count, "in place: an argument once"
    assert program.kernels.keys() == {first.kernel}
    assert first.name.endswith(f"and {count - 1} more") and "loop_group" in program.text()
    assert first.grid == sum(step.grid for step in unfused(fragment).steps if isinstance(step, KernelLaunch))


def unfused(fragment):
    """The program with each launch by itself."""
    target = GpuTarget()
    made = prepare_fragment(fragment, target)
    return launch_program("f", made.thunks, made.assignment, target.choices)


def test_inside_of_loops():
    def function(x, y, turns):
        def body(state):
            n, x, y = state
            return n + 1, jnp.tanh(x), jnp.tanh(y)

        return jax.lax.while_loop(lambda s: s[0] < turns, body, (0, x, y))

    fragment = fragment_of(function, *update_arguments()[3:5], np.int32(4))
    program = prepare_fragment(fragment, GpuTarget()).program
    (loop,) = (step for step in program.steps if isinstance(step, LoopLaunch))
    assert any("loop_group" in step.kernel for step in loop.body if isinstance(step, KernelLaunch))
    again = side_by_side(program, 1 << 20)
    assert set(again.kernels) == {s.kernel for s in again.launches() if isinstance(s, KernelLaunch)}


@pytest.mark.usefixtures("every_digit")
@needs_triton
def test_groups_compute_what_their_launches_did():
    arguments = update_arguments()
    count = len(SHAPES)
    fragment = fragment_of(updates, *arguments, donated=tuple(range(count)))
    program = prepare_fragment(fragment, GpuTarget()).program
    assert any("group" in name for name in program.kernels)
    wanted = jax.jit(updates)(*arguments)
    for got, want in zip(run_program(program, fragment, arguments), wanted, strict=True):
        np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5, atol=1e-5)
