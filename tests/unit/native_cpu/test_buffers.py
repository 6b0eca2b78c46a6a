"""Assignment of memory: packing, its independent checker, and what it says when it is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.buffers.check import check_assignment
from mpmd.compile.buffers.packing import ALIGNMENT, Block, aligned, pack
from mpmd.compile.buffers.report import assignment_report
from mpmd.compile.thunks.emission import KernelPlans
from mpmd.errors import CompileError
from tests.support.native_fragments import compiled, fragment_of

BLOCKS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 60), st.integers(0, 20)).map(
        lambda t: Block(t[0], t[1], t[1] + t[2])
    ),
    max_size=40,
)


@given(BLOCKS)
@settings(max_examples=200, deadline=None)
def test_packed_blocks_never_overlap(blocks):
    packing = pack(blocks)
    assert packing.size >= packing.lower_bound
    for i, a in enumerate(blocks):
        low = packing.offsets[i]
        assert low % ALIGNMENT == 0
        assert low + aligned(a.size) <= packing.size
        for j, b in enumerate(blocks[:i]):
            together = a.start <= b.end and b.start <= a.end
            apart = low + a.size <= packing.offsets[j] or packing.offsets[j] + b.size <= low
            assert apart or not together or not a.size or not b.size


def test_blocks_that_fit_are_packed_to_the_bound():
    blocks = [Block(640, k, k + 1) for k in range(50)]
    packing = pack(blocks)
    assert packing.size == packing.lower_bound == 2 * 640


def made():
    def chain(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x, x.sum(0)

    return compiled(fragment_of(chain, np.ones((16, 32), np.float32), np.ones((32, 32), np.float32)))


def test_a_chain_needs_two_arrays():
    assert made().assignment.arena_bytes <= 2 * 16 * 32 * 4


def test_the_checker_sees_values_that_overlap():
    assignment = made().assignment
    check_assignment(assignment, KernelPlans().may_share)
    arena = assignment.allocations[-1].number
    inside = [v for v, place in assignment.slices.items() if place.allocation == arena]
    wrong = {v: Slice(arena, 0, v.byte_size) if v in inside else p for v, p in assignment.slices.items()}
    with pytest.raises(CompileError, match="share bytes"):
        check_assignment(dataclasses.replace(assignment, slices=wrong), KernelPlans().may_share)


def test_the_checker_sees_slices_beyond_their_allocation():
    assignment = made().assignment
    value, place = next(iter(assignment.slices.items()))
    moved = {**assignment.slices, value: Slice(place.allocation, 1 << 20, place.size)}
    with pytest.raises(CompileError, match="lies at 0"):
        check_assignment(dataclasses.replace(assignment, slices=moved), KernelPlans().may_share)


def test_the_report_names_allocations_values_and_the_peak():
    text = assignment_report(made().assignment)
    assert "allocation 0: parameter 0, 2048 bytes" in text
    assert "Statistics:" in text
    assert "Peak:" in text


def test_a_loop_keeps_what_it_needs_in_every_round():
    def loop(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w) + x, x)

    check_assignment(
        compiled(fragment_of(loop, np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))).assignment,
        KernelPlans().may_share,
    )
