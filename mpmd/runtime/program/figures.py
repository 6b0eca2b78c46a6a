"""Figures of a program that take milliseconds to count, for what a step prints of itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from mpmd.brief import brief
from mpmd.runtime.program.stream_memory import held_bytes
from mpmd.runtime.program.streams import Copy, Instruction, Program, Recv, Run, Send, Stream, reads


@dataclasses.dataclass(frozen=True)
class ProgramFigures:
    """What a step runs and sends.

    Attributes:
        program: of the step.
        workspace: scratch bytes by (mesh, executable) while it runs, where known.
        kept: scratch bytes by mesh that are held all the time, where known.
    """

    program: Program
    workspace: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    kept: Mapping[str, int] = dataclasses.field(default_factory=dict)

    __repr__ = brief

    @functools.cached_property
    def runs(self) -> list[Run]:
        """The calls of fragments in a step, mesh after mesh."""
        streams = self.program.streams
        return [op for stream in streams for op in stream.instructions if isinstance(op, Run)]

    @property
    def stages(self) -> int:
        """How many stages have tasks of microbatches."""
        return len({op.stage for op in self.runs if op.microbatch is not None and op.stage is not None})

    @property
    def microbatches(self) -> int:
        """How many microbatches there are; 0 for a step without."""
        return len({op.microbatch for op in self.runs if op.microbatch is not None})

    @property
    def messages(self) -> int:
        """How many messages a step sends."""
        return sum(len(channel.types) for channel in self.program.channels)

    @property
    def message_bytes(self) -> int:
        """Bytes of all messages of a step."""
        return sum(type_.bytes for channel in self.program.channels for type_ in channel.types)

    @functools.cached_property
    def peak_bytes(self) -> dict[str, int]:
        """For each mesh the maximum of bytes held at once, as `predict_memory` counts them."""
        return {
            stream.mesh: max(held_bytes(stream, self.workspace, self.kept.get(stream.mesh, 0)), default=0)
            for stream in self.program.streams
        }

    @functools.cached_property
    def bubble(self) -> float:
        """The part of a step in which meshes wait, if a backward takes as long as two forwards.

        Other calls and messages take no time, as in the unit costs of schedules.
        """
        ends = _ends(self.program)
        whole = max(ends, default=0) * len(ends)
        return 1 - sum(map(unit_cost, self.runs)) / whole if whole else 0.0


_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def unit_cost(run: Run) -> int:
    """How many forwards a call takes: 0 for calls outside of microbatches."""
    return _UNITS.get(run.phase, 0) + run.with_forward if run.microbatch is not None else 0


def _ends(program: Program) -> list[int]:
    """When the last call of each mesh ends, a forward being one unit of time.

    A stream is advanced until it reads a message that is not sent yet, then the next one.
    """
    clocks = [_Clock(stream) for stream in program.streams]
    sent: dict[tuple[int, int], int] = {}
    while sum(clock.advance(sent) for clock in clocks):
        pass
    return [clock.now for clock in clocks]


class _Clock:
    """The time of one mesh."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._at, self.now = stream, 0, 0
        self._ready: dict[int, int] = {}
        self._posted: dict[int, tuple[int, int]] = {}

    def advance(self, sent: dict[tuple[int, int], int]) -> bool:
        """Executes what can be; whether there was anything."""
        begin, ops = self._at, self._stream.instructions
        while self._at < len(ops) and self._step(ops[self._at], sent):
            self._at += 1
        return self._at > begin

    def _step(self, op: Instruction, sent: dict[tuple[int, int], int]) -> bool:
        """Executes an instruction, unless it reads a message that is not sent yet."""
        if isinstance(op, Recv):
            self._posted[op.buffer] = op.channel, op.sequence
            return True
        for buffer in reads(op) if self._posted else ():
            message = self._posted.get(buffer)
            if message is not None:
                if message not in sent:
                    return False
                self._ready[buffer] = sent[message]
                del self._posted[buffer]
        if isinstance(op, Run):
            self.now = max([self.now, *(self._ready.get(b, 0) for b in op.inputs)]) + unit_cost(op)
            self._ready.update(dict.fromkeys(op.outputs, self.now))
        elif isinstance(op, Send):
            sent[op.channel, op.sequence] = self._ready.get(op.buffer, 0)
        elif isinstance(op, Copy):
            self._ready[op.buffer] = self._ready.get(op.source, 0)
        return True
