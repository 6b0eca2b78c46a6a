"""Both checkers and poison see memory that is wrong; temporaries borrow memory; spaces stay apart."""

import dataclasses
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.analysis.liveness import LiveRange, merged
from mpmd.compile.backends.native_cpu.handler import compile_with_handler
from mpmd.compile.backends.native_cpu.steps import PlanCode, native_program
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.buffers.assignment import Slice, assign_buffers
from mpmd.compile.buffers.buffer_report import assignment_report, holdings, memory_plot
from mpmd.compile.buffers.offsets import DeviceMemory, LiveBlock, Room, bits
from mpmd.compile.buffers.sharing import reuse_outputs
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import parse_module
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.thunks.check import check_thunks
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.thunks.thunk import CopyThunk, KernelThunk, WhileThunk
from mpmd.errors import CompileError
from tests.support.native_fragments import check_memory, compiled, fragment_of, run
from tests.support.poison import is_poison
from tests.support.svg_texts import overlaps


def ones(*shape):
    return np.ones(shape, np.float32)


def chain(x, w):
    for _ in range(3):
        x = jnp.tanh(x @ w) @ w
    return x, x.sum(0)


def made(function=chain, *arguments, poison=False):
    fragment = fragment_of(function, *(arguments or (ones(16, 32), ones(32, 32))))
    return compiled(fragment, poison=poison, attention="off")  # or products would meet in one kernel


def check(thing, thunks=None, where=None, results=None):
    assignment = thing.assignment
    check_thunks(
        thing.module,
        thing.thunks if thunks is None else thunks,
        where or assignment.at,
        assignment.allocations,
        results or assignment.results,
    )


def loop(x, w):
    return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w) + x, x)


def test_thunks_that_are_right_are_followed_through_loops_and_branches():
    check(made())
    check(made(loop, ones(4, 4), ones(4, 4)))
    check(
        made(lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, lambda x: x * 2], x), np.int32(1), ones(4, 4))
    )


def test_a_read_in_the_wrong_place_is_seen():
    thing = made()
    position = next(k for k, t in enumerate(thing.thunks) if isinstance(t, KernelThunk))
    kernel = thing.thunks[position]
    moved = tuple(dataclasses.replace(s, offset=s.offset + 64) for s in kernel.operands)
    wrong = [
        *thing.thunks[:position],
        dataclasses.replace(kernel, operands=moved),
        *thing.thunks[position + 1 :],
    ]
    with pytest.raises(CompileError, match="where none of its operands is"):
        check(thing, wrong)


def test_thunks_in_another_order_are_seen():
    thing = made()
    with pytest.raises(CompileError, match="should hold"):
        check(thing, thing.thunks[::-1])


def test_a_thunk_that_is_missing_is_seen():
    thing = made(loop, ones(4, 4), ones(4, 4))
    position = next(k for k, t in enumerate(thing.thunks) if isinstance(t, WhileThunk))
    around = thing.thunks[position]
    assert any(isinstance(t, CopyThunk) for t in (*thing.thunks[:position], *around.body))
    without = [t for t in around.body if not isinstance(t, CopyThunk)]
    before = [t for t in thing.thunks[:position] if not isinstance(t, CopyThunk)]
    wrong = [*before, dataclasses.replace(around, body=tuple(without)), *thing.thunks[position + 1 :]]
    with pytest.raises(CompileError, match="should hold"):
        check(thing, wrong)


def held_long(x, w):
    first = jnp.tanh(x @ w)
    second = jnp.tanh(first @ w)
    return (second @ w) @ first


def test_values_that_overlap_are_seen_by_both():
    """All temporaries at the start of the arena."""
    thing = made(held_long, ones(8, 8), ones(8, 8))
    arena = thing.assignment.arenas[0].number
    slices = {
        v: Slice(arena, 0, p.size) if p.allocation == arena else p for v, p in thing.assignment.slices.items()
    }
    wrong = dataclasses.replace(thing.assignment, slices=slices)
    with pytest.raises(CompileError, match="share bytes"):
        check_memory(dataclasses.replace(thing, assignment=wrong))
    thunks = Emitter(wrong, KernelPlans()).program()
    with pytest.raises(CompileError, match=r"should hold fusion"):
        check_thunks(thing.module, thunks, wrong.at, wrong.allocations, wrong.results)


def test_a_product_written_over_its_factor_is_seen():
    thing = made(held_long, ones(8, 8), ones(8, 8))
    last = thing.thunks[-1]
    wrong = dataclasses.replace(last, operands={0: last.a})
    with pytest.raises(CompileError, match="over a factor"):
        check(thing, [*thing.thunks[:-1], wrong])


def test_a_parameter_that_is_not_donated_is_not_written():
    thing = made(lambda x: x + 1, ones(8))
    (kernel,) = thing.thunks
    wrong = dataclasses.replace(kernel, operands=(kernel.operands[0], kernel.operands[0]))
    with pytest.raises(CompileError, match="writes to allocation 0: parameter 0"):
        check(thing, [wrong])


def test_poison_is_written_where_nothing_is_and_never_read():
    arguments = [ones(16, 32) / 8, ones(32, 32) / 8]
    fragment = fragment_of(chain, *arguments)
    plain, poisoned = compiled(fragment, poison=False), compiled(fragment)
    check_memory(poisoned)
    fills = [t for t in poisoned.thunks if is_poison(t)]
    assert fills
    for one, other in zip(run(fragment, arguments, plain), run(fragment, arguments, poisoned)):
        np.testing.assert_array_equal(one, other)


def fills_by_default():
    fragment = fragment_of(held_long, ones(8, 8), ones(8, 8))
    return any(is_poison(t) for t in prepare_fragment(fragment, NativeCpu()).thunks)


def test_all_tests_compile_with_poison():
    assert fills_by_default()


def test_a_test_may_compile_without_poison(unpoisoned):
    assert not fills_by_default()


def test_poison_shows_a_value_that_ends_too_early():
    """What is free after a product is overwritten before it."""
    arguments = [ones(8, 8) / 8, ones(8, 8) / 8]
    fragment = fragment_of(held_long, *arguments)
    thing = compiled(fragment, poison=True)
    assert np.isfinite(run(fragment, arguments, thing)[0]).all()
    kinds = [is_poison(t) for t in thing.thunks]
    fill = kinds.index(True, kinds.index(False))  # the first after a kernel
    early = [*thing.thunks[: fill - 1], thing.thunks[fill], thing.thunks[fill - 1], *thing.thunks[fill + 1 :]]
    with pytest.raises(CompileError, match="holds nothing"):
        check(thing, early)
    native = native_program("early", early, thing.assignment, PlanCode(host_target()))
    code = compile_with_handler(native.threaded, host_target(), arguments=2, results=1, arena=True)
    wrong = dataclasses.replace(thing, program=native, code=code)
    with pytest.raises(AssertionError, match="result 0 holds what was never written"):
        run(fragment, arguments, wrong)


# -- memory of results
def test_temporaries_borrow_the_memory_of_results():
    def late(x, w):
        y = jnp.tanh(jnp.tanh(x @ w) @ w).sum()
        return jnp.cos(x * y)

    thing = made(late, ones(64, 64), ones(64, 64))
    assert thing.assignment.reused > 0
    assert thing.assignment.arena_bytes < 2 * 64 * 64 * 4
    check_memory(thing)
    assert "reused from results" in assignment_report(thing.assignment)


def test_only_as_much_is_borrowed_as_lowers_the_peak():
    blocks = [
        LiveBlock(100, (LiveRange(0, 4),)),
        LiveBlock(60, (LiveRange(2, 3),)),
        LiveBlock(90, (LiveRange(8, 9),)),
    ]
    rooms = {7: Room(100, bits((LiveRange(5, 9),)))}
    assert reuse_outputs(blocks, rooms) == {0: (7, 0)}
    assert reuse_outputs(blocks, {}) == {}
    assert reuse_outputs([], rooms) == {}


def test_what_is_borrowed_at_the_same_time_lies_apart():
    blocks = [
        LiveBlock(64, (LiveRange(0, 4),)),
        LiveBlock(64, (LiveRange(0, 4),)),
        LiveBlock(64, (LiveRange(0, 4),)),
    ]
    loans = reuse_outputs(blocks, {1: Room(128)})
    assert sorted(loans.values()) == [(1, 0), (1, 64)]


def test_no_result_waits_where_another_must_end():
    """Both results are made while their donated arguments are needed, and are copied there at the end."""
    module = parse_module(
        """HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}), {1}: (1, {}) }
ENTRY main {
  p0 = f32[1000] parameter(0)
  p1 = f32[1000] parameter(1)
  r1 = f32[1000] negate(p0)
  x = f32[1000] cosine(p1)
  r0 = f32[1000] sine(x)
  s = f32[1000] add(p0, r0)
  ROOT r = (f32[1000], f32[1000], f32[1000]) tuple(r0, r1, s)
}
"""
    )
    assignment = assign_buffers(module, lambda instruction, operand, result: False)
    at = {i.name: assignment.at(i).allocation for i in module.entry if i.shape.is_array}
    homes = [place.allocation for place in assignment.results]
    assert homes[:2] == [at["p0"], at["p1"]]
    assert not {at["r0"], at["r1"]} & set(homes)


def test_spans_that_touch_are_one():
    assert merged([LiveRange(5, 6), LiveRange(1, 2), LiveRange(3, 4)]) == (LiveRange(1, 6),)
    assert merged([LiveRange(1, 2), LiveRange(4, 5)]) == (LiveRange(1, 2), LiveRange(4, 5))
    assert bits((LiveRange(1, 2), LiveRange(4, 4))) == 0b10110


# -- memory spaces
SPACES = """HloModule spaces, is_scheduled=true
ENTRY main {
  x = f32[1000]{0} parameter(0)
  a = f32[1000]{0:S(1)} negate(x)
  b = f32[1000]{0} cosine(x)
  c = f32[1000]{0:S(1)} sine(a)
  d = f32[1000]{0} add(b, b)
  ROOT r = f32[1000]{0} add(c, d)
}
"""


def test_values_of_two_memory_spaces_never_share_an_allocation():
    module = parse_module(SPACES)
    plans = KernelPlans()
    assignment = assign_buffers(module, plans.may_share)
    first, second = assignment.arenas
    assert (first.space, second.space) == (0, 1)
    assert second.size == 4000, "c is written over a"
    found = {i.name: assignment.at(i).allocation for i in module.entry}
    assert found["a"] == found["c"] == second.number
    assert found["b"] != second.number
    check_thunks(
        module,
        Emitter(assignment, plans).program(),
        assignment.at,
        assignment.allocations,
        assignment.results,
    )
    text = assignment_report(assignment)
    assert "arena, 4000 bytes in memory space 1" in text
    assert "Peak of memory space 1: 4000 bytes" in text


def test_a_cpu_has_one_memory():
    module = parse_module(SPACES)
    with pytest.raises(CompileError, match="values are in memory space 1\n  the target has memory space 0"):
        assign_buffers(module, KernelPlans().may_share, memory=NativeCpu().memory)


def test_arrays_begin_where_the_memory_of_a_device_says():
    module = parse_module(SPACES.replace(":S(1)", ""))

    def offsets(alignment):
        assignment = assign_buffers(module, lambda *_: False, memory=DeviceMemory(alignment))
        arena = assignment.arenas[0].number
        return {place.offset for place in assignment.slices.values() if place.allocation == arena}

    assert {offset % 64 for offset in offsets(64)} == {0} != {offset % 256 for offset in offsets(64)}
    assert {offset % 256 for offset in offsets(256)} == {0} and len(offsets(256)) > 1


# -- pictures
def test_the_report_says_who_holds_the_peak_and_the_plot_shows_it():
    assignment = made().assignment
    text, picture = assignment_report(assignment), memory_plot(assignment)
    held = assignment.arena_bytes
    assert f"Peak: {held} bytes at instant" in text
    assert " % " in text[text.index("Peak:") :]
    assert picture.startswith("<svg")
    assert picture.count("<title>") >= 3
    assert f"{held:,} bytes; most in use: {held:,}" in picture
    assert "address, bytes" in picture and "instant: position of the instruction" in picture
    drawn = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    labels = [element.text for element in drawn]
    names = {h.label for h in holdings(assignment, assignment.arenas[0])}
    assert names & set(labels) and "0" in labels
    assert overlaps(picture) == []


def test_there_is_no_chart_of_nothing():
    """A fragment whose values are all in arguments and results has a line instead of axes."""
    program = """HloModule m
ENTRY e { a = f32[4] parameter(0)
  ROOT b = f32[4] negate(a) }"""
    assignment = assign_buffers(parse_module(program), KernelPlans().may_share, memory=NativeCpu().memory)
    picture = memory_plot(assignment)
    assert holdings(assignment, assignment.arenas[0]) == []
    assert "no temporaries" in picture and "<line" not in picture and overlaps(picture) == []
