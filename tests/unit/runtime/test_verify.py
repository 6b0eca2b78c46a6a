"""Every static rule, each broken in one place of a correct program and matched by its first line."""

from __future__ import annotations

import dataclasses
import re

import pytest

from mpmd.errors import ProgramError
from mpmd.runtime.program.graph import BufferType, InputSpec, OutputSpec
from mpmd.runtime.program.streams import (
    Buffer,
    ChannelSpec,
    Copy,
    Feed,
    Fetch,
    Free,
    Instruction,
    Program,
    Recv,
    Run,
    Send,
    Stream,
)
from mpmd.runtime.program.verify_streams import verify

A = BufferType((8,), "float32", "a", bytes=32)
B = BufferType((8,), "float32", "b", bytes=32)

ON_A: tuple[Instruction, ...] = (
    Feed(0, 0),
    Run("f", (0,), (1,), microbatch=3, stage=0, phase="F"),
    Free((0,)),
    Send(1, 0, 0),
    Free((1,)),
)
ON_B: tuple[Instruction, ...] = (Recv(0, 0, 0), Run("g", (0,), (1,), (0,)), Fetch(1, 0))


def program(on_a=ON_A, on_b=ON_B, *, types=(B,), channels=None, inputs=1, outputs=1) -> Program:
    buffers = [tuple(Buffer(t, "batch" if not k and t is A else "") for k in range(4)) for t in (A, B)]
    return Program(
        "step",
        (Stream("a", buffers[0], tuple(on_a)), Stream("b", buffers[1], tuple(on_b))),
        channels or (ChannelSpec("a", "b", tuple(types)),),
        tuple(InputSpec(k, k, f"x{k}") for k in range(inputs)),
        tuple(OutputSpec(k, k, f"y{k}") for k in range(outputs)),
    )


def without(code, at):
    return code[:at] + code[at + 1 :]


def insert(code, at, *ops):
    return code[:at] + ops + code[at:]


def first_line(broken: Program) -> str:
    with pytest.raises(ProgramError) as error:
        verify(broken)
    return str(error.value).splitlines()[0]


def test_the_program_is_right_before_it_is_broken():
    order = verify(program())
    assert len(order.nodes) == 8 and order.occupancy == (1,)


MESSAGES_2 = {"types": (B, B)}
CASES = {
    "read before defined": (
        program(without(ON_A, 0)),
        r"a\[0\] .*run f\(%0\).*: buffer %0 \(batch\) is not defined",
    ),
    "read after free": (
        program(insert(ON_A, 1, Free((0,)))),
        r"a\[2\] .*: buffer %0 \(batch\) was freed at \[1\]",
    ),
    "read after donation": (
        program(on_b=insert(ON_B, 2, Copy(0, 2), Free((2,)))),
        r"b\[2\] %2 = copy %0: buffer %0 was donated at \[1\]",
    ),
    "freed twice": (
        program(insert(ON_A, 3, Free((0,)))),
        r"a\[3\] free %0: buffer %0 \(batch\) was freed at \[2\]",
    ),
    "freed twice at once": (
        program((*ON_A[:2], Free((0, 0)), *ON_A[3:])),
        r"a\[2\] free %0, %0: buffer %0 \(batch\) is freed twice",
    ),
    "defined while alive": (
        program((ON_A[0], Run("f", (0,), (1,)), Run("f", (0,), (1,)), *ON_A[2:])),
        r"a\[2\] .*: buffer %1 is defined while alive, first at \[1\]",
    ),
    "defined twice": (
        program(on_b=(*ON_B[:2], Copy(1, 0), Free((0,)), ON_B[2])),
        r"b\[2\] .*: buffer %0 is defined twice; it was donated at \[1\]",
    ),
    "donated and passed twice": (
        program(on_b=(ON_B[0], Run("g", (0, 0), (1,), (0,)), ON_B[2])),
        r"b\[1\] .*run g\(donate %0, %0\): buffer %0 is donated and passed twice",
    ),
    "donates no argument": (
        program(on_b=(ON_B[0], Run("g", (0,), (1,), (0, 2)), ON_B[2])),
        r"b\[1\] .*: donates argument 2, but has 1 arguments",
    ),
    "left over": (
        program(without(ON_A, 4)),
        r"a: buffer %1, defined at \[1\], is neither freed nor a result",
    ),
    "result freed": (
        program(on_b=(*ON_B, Free((1,)))),
        r"b\[3\] free %1: buffer %1 is freed although it is a result",
    ),
    "result donated": (
        program(on_b=(*ON_B, Run("g", (1,), (2,), (0,)), Free((2,)))),
        r"b\[3\] .*: buffer %1 is donated although it is a result",
    ),
    "no such buffer": (
        program(on_b=(*ON_B, Free((9,)))),
        r"b\[3\] free %9: buffer %9 is not one of the stream's",
    ),
    "result not fetched": (program(outputs=2), r"output 1 \(y1\) is never fetched"),
    "fetched twice": (program(on_b=(*ON_B, Fetch(1, 0))), r"b\[3\] .*: output 0 was fetched by b\[2\]"),
    "no such result": (
        program(on_b=(*ON_B, Fetch(1, 5))),
        r"b\[3\] fetches output 5, which the step does not have",
    ),
    "no such argument": (
        program((Feed(0, 4), *ON_A[1:])),
        r"a\[0\] .* feed input 4: the step has no input 4",
    ),
    "late feed": (
        program(insert(ON_A, 2, Feed(2, 0), Free((2,)))),
        r"a\[2\] .*: a feed comes after another kind of instruction",
    ),
    "no such channel": (
        program(insert(ON_A, 3, Send(1, 7, 0))),
        r"a\[3\] send %1 over channel 7 .*: there is no channel 7",
    ),
    "wrong end": (
        program(on_b=insert(ON_B, 1, Send(0, 0, 0))),
        r"b\[1\] send %0 over channel 0 message 0: channel 0 goes from a to b",
    ),
    "no such message": (program(insert(ON_A, 3, Send(1, 0, 5))), r"a\[3\] .*: channel 0 has 1 messages"),
    "message used twice": (
        program(insert(ON_A, 3, Send(1, 0, 0))),
        r"a\[4\] .*: message 0 was used at a\[3\]",
    ),
    "nothing receives": (
        program(insert(ON_A, 3, Send(1, 0, 1)), **MESSAGES_2),
        r"a\[3\] send %1 over channel 0 message 1: no receive takes this message",
    ),
    "nothing sends": (
        program(on_b=insert(ON_B, 1, Recv(2, 0, 1), Free((2,))), **MESSAGES_2),
        r"b\[1\] .* = recv channel 0 message 1: nothing sends this message",
    ),
    "other type": (
        program(types=(dataclasses.replace(B, shape=(4,)),)),
        r"a\[3\] send %1 over channel 0 message 0: buffer %1 is f32\[8\], the message is f32\[4\]",
    ),
    "channel to itself": (
        program(without(ON_A, 3), channels=(ChannelSpec("a", "a", ()),), on_b=(*ON_B[1:],)),
        r"channel 0 goes from a to a",
    ),
    "called differently": (
        program(on_b=(*ON_B[:2], Run("g", (1,), (2,)), Free((2,)), ON_B[2])),
        r"b\[2\] .*: called as \(f32\[8\]\) -> \(f32\[8\]\) donating \[\], but as .*\[0\] at b\[1\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_rule_is_reported(case):
    broken, pattern = CASES[case]
    with pytest.raises(ProgramError) as error:
        verify(broken)
    lines = [re.sub(r"^\s*\d+\. ", "", line) for line in str(error.value).splitlines()]
    assert any(re.match(pattern, line) for line in lines), lines


def test_all_findings_come_in_one_error():
    line = first_line(program(without(ON_A, 0), without(ON_B, 2)))
    assert line == "program 'step' breaks 4 rules of its streams:"


def two_way(on_a, on_b) -> Program:
    return program(on_a, on_b, channels=(ChannelSpec("a", "b", (B, B)), ChannelSpec("b", "a", (A,))))


def test_a_deadlock_names_what_waits_for_what():
    on_a = (Feed(0, 0), Recv(1, 1, 0), Send(0, 0, 0), Send(0, 0, 1), Free((0, 1)))
    on_b = (Recv(0, 0, 0), Recv(1, 0, 1), Send(0, 1, 0), Free((0,)), Fetch(1, 0))
    with pytest.raises(ProgramError) as error:
        verify(two_way(on_a, on_b))
    text = str(error.value)
    assert "a[1] %1 = recv channel 1 message 0: deadlock, waits for b[2] send %0 over channel 1" in text
    assert "b[0] %0 = recv channel 0 message 0: deadlock, waits for a[2] send %0 over channel 0" in text


def test_messages_may_be_taken_in_another_order():
    """b takes the second message first; a sends the first one first."""
    on_a = (Feed(0, 0), Send(0, 0, 0), Send(0, 0, 1), Recv(1, 1, 0), Free((0, 1)))
    on_b = (Recv(1, 0, 1), Send(1, 1, 0), Recv(0, 0, 0), Free((0,)), Fetch(1, 0))
    assert verify(two_way(on_a, on_b)).occupancy == (2, 1)
