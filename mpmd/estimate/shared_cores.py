"""When the runs of a program begin and end where meshes share the cores of a machine.

Where more meshes compute than there are cores, each gets an equal part of the time, as threads do: a run
takes longer while others run.  Between two events, the end of a run or the arrival of an array, their rate
stays the same.
"""

from __future__ import annotations

import math

from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.program.order import Node
from mpmd.runtime.program.streams import Copy, Feed, Program, Recv, Run, Send, between_memories, writes

Interval = tuple[float, float]
_SAME = 1e-12
"""Times that differ by no more, in units of themselves, are equal but for rounding."""


def shared_intervals(
    program: Program, costs: ProgramCosts, cores: int
) -> tuple[dict[Node, Interval], dict[Node, Interval]]:
    """(runs, messages): begin and end of each run, and of each message by its receive.

    A copy to or from host memory is a message, by itself.

    Args:
        program: verified streams, each in its order.
        costs: of runs on a core of their own, and of messages.
        cores: how many meshes can run at a time without slowing each other down.
    """
    simulation = _Simulation(program, costs, cores)
    while simulation.proceeds():
        pass
    return simulation.runs, simulation.messages


class _Simulation:
    def __init__(self, program: Program, costs: ProgramCosts, cores: int) -> None:
        self._program, self._costs, self._cores = program, costs, cores
        self.runs: dict[Node, Interval] = {}
        self.messages: dict[Node, Interval] = {}
        self._now = 0.0
        self._at = [0] * len(program.streams)
        self._left: dict[int, float] = {}  # stream -> work of its run that is left
        self._begun: dict[int, float] = {}
        self._ready: dict[tuple[int, int], float] = {}  # (stream, buffer) -> when it has its value
        self._received: dict[tuple[int, int], tuple[int, Node]] = {}  # message -> its buffer, its receive
        self._sent: dict[tuple[int, int], tuple[float, float]] = {}
        self._link_free: dict[tuple[int, str | None], float] = {}  # (stream, memory) -> end of the last copy
        self._awaited = [  # buffers that get their values within the step, rather than as arguments
            {b for op in stream.instructions if not isinstance(op, Feed) for b in writes(op)}
            for stream in program.streams
        ]

    def proceeds(self) -> bool:
        """Goes on to the next event; whether there was one."""
        before: list[int] = []
        while before != self._at:  # a send of one may be what another waits for
            before = list(self._at)
            waits = [self._advance(s) for s in range(len(before))]
        rate = min(1.0, self._cores / len(self._left)) if self._left else 1.0
        ends = {s: self._now + left / rate for s, left in self._left.items()}
        until = min([*ends.values(), *waits], default=math.inf)
        if until == math.inf:
            return False
        done, self._now = (until - self._now) * rate, until
        for s, end in ends.items():
            self._left[s] -= done
            if end <= until + _SAME * until:
                self._end(s)
        return True

    def _advance(self, s: int) -> float:
        """Takes a stream to its next run and begins it; when that can begin, if that is later and known."""
        stream = self._program.streams[s]
        while s not in self._left and self._at[s] < len(stream.instructions):
            node = s, self._at[s]
            match stream.instructions[self._at[s]]:
                case Run() as op:
                    ready = max((self._time(s, b) for b in op.inputs), default=0.0)
                    if ready > self._now:
                        return ready
                    self._left[s], self._begun[s] = self._costs.run_s(op.executable), self._now
                    return math.inf
                case Send() as op:
                    if self._time(s, op.buffer) == math.inf:
                        return math.inf
                    begin = max(self._now, self._time(s, op.buffer))
                    kinds = (
                        stream.buffers[op.buffer].type,
                        self._program.channels[op.channel].types[op.sequence],
                    )
                    self._sent[op.channel, op.sequence] = begin, begin + self._costs.message_s(kinds)
                    self._arrive((op.channel, op.sequence))
                case Copy() as op:
                    if self._time(s, op.source) == math.inf:
                        return math.inf
                    self._ready[s, op.buffer] = self._copied(s, op, node)
                case Recv() as op:
                    self._received[op.channel, op.sequence] = op.buffer, node
                    self._arrive((op.channel, op.sequence))
            self._at[s] += 1
        return math.inf

    def _copied(self, s: int, op: Copy, node: Node) -> float:
        """When a copy has ended; those of one direction between the memories of a mesh follow each other."""
        kinds = between_memories(op, self._program.streams[s])
        if kinds is None:
            return self._time(s, op.source)
        link = s, kinds[1].memory_kind
        begin = max(self._now, self._time(s, op.source), self._link_free.get(link, 0.0))
        end = self._link_free[link] = begin + self._costs.message_s(kinds)
        self.messages[node] = begin, end
        return end

    def _time(self, s: int, buffer: int) -> float:
        """When a buffer has its value; infinite while that is not known."""
        return self._ready.get((s, buffer), math.inf) if buffer in self._awaited[s] else 0.0

    def _arrive(self, message: tuple[int, int]) -> None:
        if message in self._sent and message in self._received:
            buffer, recv = self._received[message]
            self.messages[recv] = self._sent[message]
            self._ready[recv[0], buffer] = self._sent[message][1]

    def _end(self, s: int) -> None:
        op = self._program.streams[s].instructions[self._at[s]]
        assert isinstance(op, Run)
        self.runs[s, self._at[s]] = self._begun[s], self._now
        self._ready.update({(s, b): self._now for b in op.outputs})
        del self._left[s], self._begun[s]
        self._at[s] += 1
