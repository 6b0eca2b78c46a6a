from __future__ import annotations

import dataclasses

import pytest

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from mpmd.errors import ProgramError
from mpmd.runtime.program.graph import CallNode, EntryGraph, OutputSpec, check_graph
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.streams import Copy, Feed, Fetch, Free, Run, Send, instruction_text


def listing(program, mesh: str) -> list[str]:
    stream = next(s for s in program.streams if s.mesh == mesh)
    return [instruction_text(op) for op in stream.instructions]


def test_a_chain_over_two_meshes():
    b = GraphBuilder()
    x = b.input("a")
    (y,) = b.call("f", "a", [x])
    (z,) = b.call("g", "b", [b.transfer(y, "b")], donated=(0,))
    b.output(z)
    program = linearize(b.graph())
    assert listing(program, "a") == [
        "%0 = feed input 0",
        "%1 = run f(%0)",
        "free %0",
        "send %1 over channel 0 message 0",
        "free %1",
    ]
    assert listing(program, "b") == [
        "%0 = recv channel 0 message 0",
        "%1 = run g(donate %0)",
        "fetch %1 as output 0",
    ]


def test_a_transferred_argument_is_fed_to_the_other_mesh():
    b = GraphBuilder()
    x = b.input("a")
    on_b = b.transfer(x, "b")
    on_c = b.transfer(on_b, "c")
    for mesh, value in (("a", x), ("b", on_b), ("c", on_c)):
        b.output(*b.call("f", mesh, [value]))
    program = linearize(b.graph())
    assert program.channels == ()
    assert [listing(program, m)[0] for m in "abc"] == ["%0 = feed input 0"] * 3


def test_a_value_nobody_needs_is_not_moved():
    b = GraphBuilder()
    x = b.input("a")
    y, _ = b.call("f", "a", [x], 2)
    b.transfer(b.transfer(y, "b"), "c")
    b.output(y)
    program = linearize(b.graph())
    assert program.channels == () and [s.mesh for s in program.streams] == ["a"]
    assert "free %0, %2" in listing(program, "a")


def test_a_value_is_relayed_over_a_third_mesh():
    b = GraphBuilder()
    (y,) = b.call("f", "a", [b.input("a")])
    b.output(b.transfer(b.transfer(y, "b"), "c"))
    program = linearize(b.graph())
    assert listing(program, "b") == [
        "%0 = recv channel 0 message 0",
        "send %0 over channel 1 message 0",
        "free %0",
    ]
    assert listing(program, "c") == ["%0 = recv channel 1 message 0", "fetch %0 as output 0"]


def offloading(tasks_between: int):
    """A forward whose residual waits in host memory while other tasks run, and its backward."""
    b = GraphBuilder()
    x = b.input("m0")
    (residual,) = b.call("f", "m0", [x], stage=0, microbatch=0, phase="F")
    held = b.transfer(residual, "m0", memory_kind="pinned_host")
    others = [b.call("g", "m0", [x], stage=0, microbatch=i + 1, phase="F")[0] for i in range(tasks_between)]
    (y,) = b.call("h", "m0", [b.transfer(held, "m0")], stage=0, microbatch=0, phase="B")
    for value in (*others, y):
        b.output(value)
    return linearize(b.graph())


def test_a_copy_from_host_memory_begins_a_task_before_its_use():
    assert listing(offloading(2), "m0")[1:10] == [
        "%1 = run f(%0)  # F stage 0 microbatch 0",
        "%2 = copy %1",
        "free %1",
        "%3 = run g(%0)  # F stage 0 microbatch 1",
        "%4 = copy %2",
        "free %2",
        "%5 = run g(%0)  # F stage 0 microbatch 2",
        "free %0",
        "%6 = run h(%4)  # B stage 0 microbatch 0",
    ]


def test_what_no_task_reads_comes_back_from_host_memory_behind_all_tasks():
    b = GraphBuilder()
    x = b.input("m0")
    (state,) = b.call("init", "m0", [x])
    held = b.transfer(state, "m0", memory_kind="pinned_host")
    (y,) = b.call("f", "m0", [x], stage=0, microbatch=0, phase="B")
    (new,) = b.call("update", "m0", [b.transfer(held, "m0"), y])
    b.output(new)
    assert listing(linearize(b.graph()), "m0")[4:8] == [
        "%3 = run f(%0)  # B stage 0 microbatch 0",
        "free %0",
        "%4 = copy %2",
        "free %2",
    ]


def test_nor_does_it_begin_before_its_value_is_there():
    assert listing(offloading(0), "m0")[3:7] == ["%2 = copy %1", "free %1", "%3 = copy %2", "free %2"]


def test_a_transfer_within_a_mesh_is_a_copy():
    b = GraphBuilder()
    (y,) = b.call("f", "a", [b.input("a")])
    b.output(b.transfer(y, "a", memory_kind="pinned_host"))
    program = linearize(b.graph())
    assert Copy(1, 2) in program.streams[0].instructions
    assert program.streams[0].buffers[2].type.memory_kind == "pinned_host"


class TestDonation:
    def ops(self, graph, mesh="a"):
        program = linearize(graph)
        return next(s for s in program.streams if s.mesh == mesh).instructions

    def test_what_is_needed_afterwards_is_copied(self):
        b = GraphBuilder()
        (y,) = b.call("f", "a", [b.input("a")])
        b.call("g", "a", [y], donated=(0,))
        b.output(y)
        ops = self.ops(b.graph())
        assert Copy(1, 2) in ops and Run("g", (2,), (3,), (0,)) in ops and Fetch(1, 0) in ops

    def test_what_is_passed_twice_is_copied(self):
        b = GraphBuilder()
        (y,) = b.call("f", "a", [b.input("a")])
        b.output(*b.call("g", "a", [y, y], donated=(0,)))
        ops = self.ops(b.graph())
        assert Copy(1, 2) in ops and Run("g", (2, 1), (3,), (0,)) in ops and Free((1,)) in ops

    def test_what_was_sent_is_not_copied(self):
        b = GraphBuilder()
        (y,) = b.call("f", "a", [b.input("a")])
        sent = b.transfer(y, "b")
        b.output(*b.call("g", "a", [y], donated=(0,)))
        b.output(sent)
        assert not any(isinstance(op, Copy) for op in self.ops(b.graph()))

    @pytest.mark.parametrize("given", [True, False])
    def test_an_argument_the_user_keeps_is_fed_apart(self, given):
        b = GraphBuilder()
        b.output(*b.call("f", "a", [b.input("a", donated=given)], donated=(0,)))
        assert self.ops(b.graph())[0] == Feed(0, 0, fresh=not given)

    def test_only_the_home_of_an_argument_consumes_the_users_array(self):
        b = GraphBuilder()
        x = b.input("a", donated=True)
        on_b = b.transfer(x, "b")
        b.output(*b.call("f", "a", [x], donated=(0,)))
        b.output(*b.call("f", "b", [on_b], donated=(0,)))
        assert self.ops(b.graph(), mesh="a")[0] == Feed(0, 0, fresh=False)
        assert self.ops(b.graph(), mesh="b")[0] == Feed(0, 0, fresh=True)


def test_sends_are_only_those_the_dataflow_needs():
    stages, microbatches = 4, 8
    program = linearize(one_f_one_b(stages, microbatches))
    sends = [op for s in program.streams for op in s.instructions if isinstance(op, Send)]
    assert len(sends) == 2 * (stages - 1) * microbatches + 1  # and one result asked for on another mesh


def test_the_text_shows_everything_once():
    program = linearize(one_f_one_b(2, 2))
    text = program.as_text()
    assert text.startswith(f"program main fingerprint {program.fingerprint}\n")
    assert "channel 0: m0 -> m1 tagged" in text
    assert '= run forward(%0, %2)  # F stage 0 microbatch 0 "layer 0"' in text
    assert len(text.splitlines()) == 1 + 6 + 3 + 2 + 5 + 2 + program.num_instructions
    changed = dataclasses.replace(program, name="other", outputs=program.outputs[:2])
    assert changed.fingerprint != program.fingerprint


def test_everything_wrong_with_a_graph_is_told_at_once():
    b = GraphBuilder()
    x = b.input("a")
    (y,) = b.call("f", "b", [x], donated=(3,))
    b.transfer(y, "a", shape=(4,))
    b.ops.append(CallNode("g", "a", (99,), (x, 77)))
    graph = b.graph()
    graph = EntryGraph(graph.ops, graph.types, graph.inputs, (OutputSpec(55, 0, "loss"),))
    with pytest.raises(ProgramError) as error:
        check_graph(graph)
    assert str(error.value).splitlines() == [
        "the entry function is not a program, 7 problems:",
        "  1. op 0, call of 'f' on mesh 'b': value 0 lives on mesh 'a'",
        "  2. op 0, call of 'f' on mesh 'b': donates argument 3, but has 1",
        "  3. op 1, transfer of value 1 to value 2: makes f32[4] from f32[8]",
        "  4. op 2, call of 'g' on mesh 'a': value 99 is used before it is defined",
        "  5. op 2, call of 'g' on mesh 'a': value 0 is defined twice, first by input 0 (x0)",
        "  6. op 2, call of 'g' on mesh 'a': value 77 has no type",
        "  7. output 0 (loss): value 55 is used before it is defined",
    ]


def test_two_results_are_two_arrays():
    b = GraphBuilder()
    (y,) = b.call("f", "a", [b.input("a")])
    b.output(y)
    b.output(y)
    assert listing(linearize(b.graph()), "a")[2:] == [
        "free %0",
        "fetch %1 as output 0",
        "%2 = copy %1",
        "fetch %2 as output 1",
    ]
