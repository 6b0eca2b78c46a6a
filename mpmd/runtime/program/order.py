"""Possible orders of the instructions of all meshes, and how many messages can wait.

Streams have no branches and each receive names its message, so whether a program stops does not depend
on timing: it stops in every execution or in none, and it stops exactly if the edges below have a cycle.

Edges: program order; each send to its receive.  A receive from other processes only does not wait: it posts
the request, and the first instruction that reads the buffer waits for the send.  In-order devices, in-order
issue and bounds on run-ahead only add edges along program order, so they never make a cycle.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_right, insort
from collections import deque

from mpmd.brief import brief
from mpmd.runtime.program.streams import Program, Recv, Run, Send, Stream, reads

Node = tuple[int, int]
"""(number of the stream, position in it)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A send and its receive."""

    channel: int
    sequence: int
    send: Node
    recv: Node


@dataclasses.dataclass(frozen=True)
class InstructionOrder:
    """A legal order of all instructions, equal in every process, and its consequences.

    Attributes:
        nodes: every instruction once, each after its dependences.
        before: for an instruction that waits for other streams, its dependences there.
        pairs: per channel its messages.
        streams: how many there are.
    """

    nodes: tuple[Node, ...]
    before: dict[Node, list[Node]]
    pairs: list[list[Message]]
    streams: int

    __repr__ = brief

    @functools.cached_property
    def occupancy(self) -> tuple[int, ...]:
        """Per channel the maximum of messages that can wait in it, under any timing."""
        return occupancy(self)


def message_ends(program: Program) -> tuple[list[dict[int, Node]], list[dict[int, Node]]]:
    """Per channel the first send of each message, and its first receive."""
    sends: list[dict[int, Node]] = [{} for _ in program.channels]
    recvs: list[dict[int, Node]] = [{} for _ in program.channels]
    for s, stream in enumerate(program.streams):
        for at, op in enumerate(stream.instructions):
            if isinstance(op, (Send, Recv)) and 0 <= op.channel < len(program.channels):
                table = sends if isinstance(op, Send) else recvs
                table[op.channel].setdefault(op.sequence, (s, at))
    return sends, recvs


def messages(program: Program) -> list[list[Message]]:
    """Per channel its messages in the order of the sends; unpaired ones are left out."""
    sends, recvs = message_ends(program)
    return [
        [Message(c, k, node, recvs[c][k]) for k, node in sends[c].items() if k in recvs[c]]
        for c in range(len(program.channels))
    ]


def waits_for(program: Program, pairs: list[list[Message]]) -> dict[Node, list[Node]]:
    """The edges between streams: for an instruction, those of other streams that must come first."""
    readers: dict[int, dict[int, int]] = {}  # of the streams that receive from other processes
    before: dict[Node, list[Node]] = {}
    for pair in pairs:
        for message in pair:
            s, at = message.recv
            if message.channel in program.posted:
                stream = program.streams[s]
                first = readers[s] if s in readers else readers.setdefault(s, _first_readers(stream))
                op = stream.instructions[at]
                assert isinstance(op, Recv)
                at = max(at, first.get(op.buffer, at))
            before.setdefault((s, at), []).append(message.send)
    return before


def _first_readers(stream: Stream) -> dict[int, int]:
    """Per buffer the position of the first instruction that reads it."""
    first: dict[int, int] = {}
    for at, op in enumerate(stream.instructions):
        for buffer in reads(op):
            first.setdefault(buffer, at)
    return first


def linear_order(program: Program, before: dict[Node, list[Node]]) -> tuple[list[Node], dict[int, int]]:
    """A legal order as far as it goes, and for each stream that cannot finish the position where it stops.

    Every stream is advanced as far as possible, in turn; a stream that waits is resumed when its dependence
    is done.  O(instructions + edges).
    """
    lengths = [len(stream.instructions) for stream in program.streams]
    at = [0] * len(lengths)
    waiting: dict[Node, list[int]] = {}
    queue = deque(range(len(lengths)))
    nodes: list[Node] = []
    while queue:
        s = queue.popleft()
        while at[s] < lengths[s]:
            missing = next((n for n in before.get((s, at[s]), ()) if n[1] >= at[n[0]]), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(s)
                break
            node = (s, at[s])
            nodes.append(node)
            at[s] += 1
            queue.extend(waiting.pop(node, ()))
    return nodes, {s: k for s, k in enumerate(at) if k < lengths[s]}


def occupancy(order: InstructionOrder) -> tuple[int, ...]:
    """Per channel the maximum of messages sent and not received, over all timings; the bound is reached.

    At the moment of send k exactly the receives in its past have happened in every execution; the others
    may all be late.  Each stream has a vector clock (the last position in the past, for every stream), which
    changes only where streams meet.  The clock of a send is kept until its message was waited for.

    Cost: O(instructions + messages × (meshes + log messages)).
    """
    clock = [[-1] * order.streams for _ in range(order.streams)]
    snapshots: dict[Node, list[int]] = {}
    seen: dict[Node, int] = {}  # per send, the position of its receiver in its past
    receiver = {message.send: message.recv[0] for pair in order.pairs for message in pair}
    for s, at in order.nodes:
        own = clock[s]
        own[s] = at
        for node in order.before.get((s, at), ()):
            own[:] = map(max, own, snapshots.pop(node))
        if (s, at) in receiver:
            snapshots[s, at] = own.copy()
            seen[s, at] = own[receiver[s, at]]
    worst = []
    for pair in order.pairs:
        most, receives = 0, list[int]()  # positions of the receives of the messages sent so far
        for message in pair:
            insort(receives, message.recv[1])
            most = max(most, len(receives) - bisect_right(receives, seen[message.send]))
        worst.append(most)
    return tuple(worst)


def earliest_begins(program: Program, order: InstructionOrder) -> dict[Node, int]:
    """When each instruction could begin, if every run takes one unit of time and everything else none."""
    begin: dict[Node, int] = {}
    end: dict[Node, int] = {}
    free = [0] * len(program.streams)
    for s, at in order.nodes:
        begin[s, at] = max([free[s], *(end[node] for node in order.before.get((s, at), ()))])
        end[s, at] = free[s] = begin[s, at] + isinstance(program.streams[s].instructions[at], Run)
    return begin


def issue_order(program: Program, order: InstructionOrder) -> list[Node]:
    """The order in which one thread should issue everything: by the earliest begin of each instruction.

    So no mesh is issued far ahead of the others and none waits for work because the thread is busy with
    another's.
    """
    begin = earliest_begins(program, order)
    rank = {node: k for k, node in enumerate(order.nodes)}
    return sorted(order.nodes, key=lambda node: (begin[node], rank[node]))
