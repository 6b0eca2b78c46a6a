"""Small arrays that leave together: which do, and that every bit arrives."""

import jax
import numpy as np
import pytest

from mpmd.runtime.channels.packing import leaving_together, pack, packed_size, unpacker
from mpmd.runtime.channels.remote import Packet, RemoteChannel
from mpmd.runtime.graph import BufferType
from mpmd.runtime.instructions import Feed, Recv, Run, Send
from mpmd.runtime.program import Buffer, Stream

SCALAR, VECTOR = BufferType((), "float32", "m0"), BufferType((2, 3), "int32", "m0")
RUN = Run("f", (), (0, 1, 2))


def stream(*instructions, types=(SCALAR,) * 4):
    return Stream("m0", tuple(Buffer(type_, f"b{n}") for n, type_ in enumerate(types)), instructions)


@pytest.mark.parametrize(
    ("instructions", "groups"),
    [
        ((RUN, Send(0, 0, 0), Send(2, 1, 0), Send(1, 0, 1)), [(0, 1)]),
        ((Feed(0, 0), Feed(1, 1), Send(0, 0, 0), Send(1, 0, 1)), [(0, 1)]),
        ((RUN, Send(0, 0, 0), Run("g", (), ()), Send(1, 0, 1), Send(2, 0, 2)), [(1, 2)]),
        ((RUN, Recv(3, 2, 0), Send(0, 0, 0), Send(3, 0, 1)), []),
        ((RUN, Send(0, 0, 0), Send(1, 1, 0)), []),
    ],
    ids=["beside another channel", "arguments", "not across a run", "not what was received", "one each"],
)
def test_messages_leave_together_if_nothing_can_come_between(instructions, groups):
    assert leaving_together(stream(*instructions), 0) == groups


@pytest.mark.parametrize(
    "other",
    [
        BufferType((), "bfloat16", "m0"),
        BufferType((1025,), "float32", "m0"),
        BufferType((0,), "float32", "m0"),
    ],
)
def test_large_and_other_arrays_go_alone(other):
    sends = stream(RUN, Send(0, 0, 0), Send(1, 0, 1), types=(SCALAR, other, SCALAR, SCALAR))
    assert leaving_together(sends, 0) == []


def test_every_bit_of_a_packet_arrives_in_any_order_of_the_receives():
    nan = np.array(0x7FA00001, np.uint32).view(np.float32)  # one that sums would make quiet
    sent = [jax.numpy.asarray(nan), jax.numpy.arange(6, dtype=np.int32).reshape(2, 3) - 3]
    offered = {}

    class Wire:
        def put(self, number, arrays):
            offered[number] = arrays

        def pull(self, process, number, types):
            assert (process, [(t.shape, t.dtype) for t in types]) == (5, [((7,), np.uint32)])
            return offered.pop(number)

    types = [SCALAR, VECTOR]
    bits = jax.ShapeDtypeStruct((packed_size(types),), np.uint32)
    packet = Packet((3, 4), 3, bits, unpacker(types))
    channel = RemoteChannel(Wire(), 5, Wire(), {3: packet, 4: packet}, lambda number: 100 + number)
    channel.send(3, sent[0])
    assert not offered
    channel.send(4, sent[1])
    assert list(offered) == [103]
    arrived = [channel.recv(4), channel.recv(3)][::-1]
    assert not offered
    assert [(a.dtype, a.shape) for a in arrived] == [(a.dtype, a.shape) for a in sent]
    assert [np.asarray(a).tobytes() for a in arrived] == [np.asarray(a).tobytes() for a in sent]
    assert pack(*sent).dtype == np.uint32
