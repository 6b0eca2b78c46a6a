"""Messages whose both ends must be issued by all processes in one order: pairs.

A communicator of GPUs matches a send and a receive by nothing but their order, and each waits for the other
on the one stream of its device for such copies.  So all pairs of a program have one order, by when their
values are computed, and every process issues its ends in this order:

* a send where it is in the stream, right behind what computes it
* a receive where it is in the stream, a task before its use, but not before what precedes the pair, other
  pairs, collectives and other sends, and in any case before what follows it

`check_pairs` runs the result under the strictest rules: each process waits at each end for the other end, in
collectives for all others, and begins nothing before.  If all come to the end, they do so under any timing.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

from mpmd.errors import ProgramError
from mpmd.runtime.program.order import InstructionOrder, Message, Node, earliest_begins
from mpmd.runtime.program.streams import Copy, Instruction, Program, Recv, Run, instruction_text, reads

MessageKey = tuple[int, int]
"""The channel of a message, and its number there."""


@dataclasses.dataclass(frozen=True)
class PairOrder:
    """The pairs of a program, in order, and what each process issues.

    Attributes:
        pairs: in the order in which every process issues its ends.
        issued: for each process all of its instructions, in order.
    """

    pairs: tuple[Message, ...]
    issued: Mapping[int, tuple[Node, ...]]


def order_pairs(program: Program, order: InstructionOrder, paired: Collection[MessageKey]) -> PairOrder:
    """Orders pairs, and the instructions of all processes around them; checked.

    Args:
        program: a verified program.
        order: of its instructions.
        paired: which messages are pairs: between meshes without a common process.

    Raises:
        ProgramError: a pair is within a process.
    """
    nodes = _by_slots(program, order)
    rank = {node: k for k, node in enumerate(nodes)}
    chosen = [m for of in order.pairs for m in of if (m.channel, m.sequence) in paired]
    pairs = tuple(sorted(chosen, key=lambda message: rank[message.send]))
    processes = sorted({process for stream in program.streams for process in stream.processes})
    issued = {process: _issued(program, order, nodes, rank, pairs, process) for process in processes}
    pair_order = PairOrder(pairs, issued)
    check_pairs(program, order, pair_order)
    return pair_order


def _by_slots(program: Program, order: InstructionOrder) -> list[Node]:
    """All instructions in an order that is legal for all processes together.

    By the begin of the run before them in their stream, the legal order of the program between equals: a
    message follows the run that computes it, before runs of other meshes at the same time, so that its
    receive may be issued before one of these.
    """
    begin = earliest_begins(program, order)
    slot: dict[Node, int] = {}
    last = [0] * len(program.streams)
    for node in order.nodes:
        if isinstance(_op(program, node), Run):
            last[node[0]] = begin[node]
        waited = (slot[other] for other in order.before.get(node, ()))
        slot[node] = last[node[0]] = max(last[node[0]], *waited, 0)
    place = {node: k for k, node in enumerate(order.nodes)}
    return sorted(order.nodes, key=lambda node: (slot[node], place[node]))


def _issued(
    program: Program,
    order: InstructionOrder,
    nodes: Sequence[Node],
    rank: Mapping[Node, int],
    pairs: Sequence[Message],
    process: int,
) -> tuple[Node, ...]:
    """The instructions of a process: by their ranks, but for receives, which have a place of their own.

    A place is a rank, whether it is before (0), at (1) or behind (2) the instruction of that rank, and the
    number of the pair.
    """
    here = {s for s, stream in enumerate(program.streams) if process in stream.processes}
    own = [(k, pair) for k, pair in enumerate(pairs) if here & {pair.send[0], pair.recv[0]}]
    # other messages that leave or arrive, and what several processes do together: pairs may wait for these,
    # and these for pairs
    others = [m for c in program.between_processes for m in order.pairs[c]]
    together = [rank[node] for node in nodes if node[0] in here and _is_met(program, node)]
    points = sorted([*together, *(rank[m.send] for m in others if m.send[0] in here)])
    needs = {rank[m.send]: _waiting(program, rank, m) for m in others if m.recv[0] in here}
    # From the last pair to the first: how late this process may issue each.  `bound` is the lowest rank so
    # far that has to come after: collectives behind the send, instructions that wait for messages sent behind
    # it, and the sends of this pair and of later pairs, where they are here.
    latest, bound = {}, len(rank)
    arrivals = sorted(needs)
    for k, pair in reversed(own):
        while together and together[-1] >= rank[pair.send]:
            bound = min(bound, together.pop())
        while arrivals and arrivals[-1] >= rank[pair.send]:
            bound = min(bound, needs[arrivals.pop()])
        latest[k] = bound = min(bound, rank[pair.send]) if pair.send[0] in here else bound
    # From the first pair to the last, which keeps their order.  A receive is placed a task before its use,
    # but behind the pair before it, and behind the last collective or send of another message that precedes
    # the pair.  `latest` wins, because the other process issues its end where the order of pairs has it.
    place: dict[Node, tuple[int, int, int]] = {}
    before = (-1, 0, 0)
    for k, pair in own:
        if pair.send[0] in here:
            before = (rank[pair.send], 1, 0)
            continue
        passed = bisect_left(points, rank[pair.send])
        wanted = max((rank[pair.recv], 1, k), (before[0], 2, k), (points[passed - 1] if passed else -1, 2, k))
        before = place[pair.recv] = min(wanted, (latest[k], 0, k))
    mine = (node for node in nodes if node[0] in here)
    return tuple(sorted(mine, key=lambda node: place.get(node, (rank[node], 1, 0))))


def _op(program: Program, node: Node) -> Instruction:
    return program.streams[node[0]].instructions[node[1]]


def _is_met(program: Program, node: Node) -> bool:
    return len(program.streams[node[0]].processes) > 1 and isinstance(_op(program, node), (Run, Copy))


def _waiting(program: Program, rank: Mapping[Node, int], message: Message) -> int:
    """The rank of the instruction that waits for a message: the first reader, or the receive; see `order`."""
    s, at = message.recv
    if message.channel not in program.posted:
        return rank[s, at]
    instructions = program.streams[s].instructions
    op = instructions[at]
    assert isinstance(op, Recv)
    readers = (rank[s, k] for k in range(at + 1, len(instructions)) if op.buffer in reads(instructions[k]))
    return next(readers, len(rank))


def check_pairs(program: Program, order: InstructionOrder, pair_order: PairOrder) -> None:
    """Runs all processes: each waits for the other ends of its pairs, in collectives, and for what it reads.

    Raises:
        ProgramError: they cannot all come to the end, or one issues its pairs in another order.
    """
    of_pair = {node: k for k, pair in enumerate(pair_order.pairs) for node in (pair.send, pair.recv)}
    streams = program.streams
    at = dict.fromkeys(pair_order.issued, 0)
    passed: dict[Node, int] = {}
    met = set[tuple[int, Node]]()
    following = 0

    def ends(pair: Message) -> list[tuple[int, Node]]:
        return [(p, node) for node in (pair.send, pair.recv) for p in streams[node[0]].processes]

    def is_ready(process: int, node: Node) -> bool:
        if _is_met(program, node) and (process, node) not in met:
            others = streams[node[0]].processes
            if any(_next(pair_order, at, other) != node for other in others):
                return False
            met.update((other, node) for other in others)
        awaited = (n for n in order.before.get(node, ()) if n not in of_pair)
        return all(passed.get(n, 0) == len(streams[n[0]].processes) for n in awaited)

    moved = True
    while moved:
        moved = False
        for process in pair_order.issued:
            while (node := _next(pair_order, at, process)) is not None:
                if node in of_pair or not is_ready(process, node):
                    break
                passed[node] = passed.get(node, 0) + 1
                at[process] += 1
                moved = True
        if following < len(pair_order.pairs):
            waiting = ends(pair_order.pairs[following])
            if all(_next(pair_order, at, process) == node for process, node in waiting):
                for process, _ in waiting:
                    at[process] += 1
                following, moved = following + 1, True
    # Processes that did not come to their end wait for others, which are not there and never will be.
    stuck = {process: last for process in at if (last := _next(pair_order, at, process)) is not None}
    if stuck:
        lines = (
            f"  process {process} waits at {streams[s].mesh}[{k}] "
            f"{instruction_text(streams[s].instructions[k])}"
            for process, (s, k) in stuck.items()
        )
        raise ProgramError(
            f"program {program.name!r} has no order in which all processes can exchange arrays directly:\n"
            + "\n".join(lines)
        )


def _next(pair_order: PairOrder, at: Mapping[int, int], process: int) -> Node | None:
    nodes = pair_order.issued[process]
    return nodes[at[process]] if at[process] < len(nodes) else None
