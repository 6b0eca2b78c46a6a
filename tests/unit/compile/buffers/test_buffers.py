"""Assignment of memory: packing, its independent checker, and what it says when it is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.workloads.direct import DirectSequence
from mpmd.compile.analysis.dataflow import Dataflow
from mpmd.compile.analysis.liveness import LiveRange, Occupancy
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.buffers.buffer_report import assignment_report
from mpmd.compile.buffers.offsets import ANY_MEMORY, LiveBlock, pack
from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.kernel_plan import may_share
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.thunks.emission import KernelPlans
from mpmd.errors import CompileError
from tests.support.assignment_check import check_assignment
from tests.support.native_fragments import compiled, fragment_of
from tests.support.scheduled_loop import LOOP

BLOCKS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 60), st.integers(0, 20)).map(
        lambda t: LiveBlock(t[0], (LiveRange(t[1], t[1] + t[2]),))
    ),
    max_size=40,
)


@given(BLOCKS)
@settings(max_examples=60, deadline=None)
def test_packed_blocks_never_overlap(blocks):
    packed = pack(blocks)
    assert packed.size >= packed.lower_bound
    for i, a in enumerate(blocks):
        low = packed.offsets[i]
        assert low % ANY_MEMORY.alignment_of(a.size) == 0
        assert low + a.size <= packed.size
        for j, b in enumerate(blocks[:i]):
            together = a.spans[0].meets(b.spans[0])
            apart = low + a.size <= packed.offsets[j] or packed.offsets[j] + b.size <= low
            assert apart or not together or not a.size or not b.size


def test_blocks_that_fit_are_packed_to_the_bound():
    blocks = [LiveBlock(640, (LiveRange(k, k + 1),)) for k in range(50)]
    packed = pack(blocks)
    assert packed.size == packed.lower_bound == 2 * 640


def test_several_orders_find_what_one_order_misses():
    """Large ones first are 64 bytes above the bound."""
    blocks = [(3, 1, 3), (1, 2, 5), (1, 4, 7), (3, 6, 9)]
    packed = pack([LiveBlock(64 * size, (LiveRange(start, end),)) for size, start, end in blocks])
    assert packed.size == packed.lower_bound


def made():
    def chain(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x, x.sum(0)

    fragment = fragment_of(chain, np.ones((16, 32), np.float32), np.ones((32, 32), np.float32))
    return compiled(fragment, attention="off")  # or products would meet in one kernel


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
    with pytest.raises(CompileError, match="is at 0"):
        check_assignment(dataclasses.replace(assignment, slices=moved), KernelPlans().may_share)


def test_the_report_names_allocations_values_and_the_peak():
    text = assignment_report(made().assignment)
    assert "allocation 0: parameter 0, 2048 bytes" in text
    assert "Statistics:" in text
    assert "Peak:" in text


def test_the_report_says_what_packing_wastes():
    assignment = made().assignment
    tight = dataclasses.replace(assignment.packing, lower_bound=assignment.packing.size - 64)
    text = assignment_report(dataclasses.replace(assignment, packings={0: tight}))
    assert f" arena: {tight.size} bytes, 64 above the maximum live at once" in text


@pytest.mark.parametrize("row", [37, 1])
def test_a_row_is_read_before_results_are_written_over_it(row):
    """Both results lie over operands that the same pass reads for its sum."""
    rows = 5
    b = PlanBuilder("over", (rows, row), row_dims=1)
    x, y, z = (b.load_dense(b.operand(n, "f32", rows * row)) for n in "xyz")
    total = b.reduce_row("add", b.apply("multiply", x, y))
    b.store_dense(b.operand("a", "f32", rows * row), b.apply("add", z, z))
    b.store_dense(b.operand("b", "f32", rows * row), b.apply("multiply", y, total))
    plan = b.finish()
    assert may_share(plan, 0, 3)
    assert may_share(plan, 1, 4)
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((rows, row)).astype(np.float32) for _ in range(3)]
    held = [aligned_empty((rows, row), np.float32) for _ in range(3)]
    for array, values in zip(held, given):
        array[:] = values
    DirectSequence(plan_kernels(plan, host_target()), host_target())(*held, *held[:2])
    np.testing.assert_allclose(held[0], 2 * given[2], rtol=1e-6)
    sums = (given[0] * given[1]).sum(1, keepdims=True)
    np.testing.assert_allclose(held[1], given[1] * sums, rtol=1e-4, atol=1e-5)


def test_a_state_that_was_read_makes_room_until_the_next_round():
    """`a` is made of the state, `b` of `a`: while `b` is made, nobody needs the old state any more."""
    module = parse_module("HloModule m, is_scheduled=true\n" + LOOP.replace("BODY", "negate(a)"))
    dataflow = Dataflow(module)
    occupancy = Occupancy(dataflow)
    at = {i.name: i for c in module.computations for i in c}
    state = dataflow.value_at(at["l"], (1,))
    inside, after = occupancy.spans[state]
    assert inside.end == occupancy.instants[at["a"]] < occupancy.instants[at["b"]] < after.start
    assert not occupancy.conflict(state, dataflow.value_at(at["b"]))
    assert occupancy.conflict(state, dataflow.value_at(at["a"]))


def test_a_loop_keeps_what_it_needs_in_every_round():
    def loop(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w) + x, x)

    check_assignment(
        compiled(fragment_of(loop, np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))).assignment,
        KernelPlans().may_share,
    )
