"""A program: one straight-line stream per mesh, the channels between them, and the edges of the step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

from mpmd.runtime.graph import BufferType, InputSpec, OutputSpec
from mpmd.runtime.instructions import (
    Copy,
    Feed,
    Fetch,
    Free,
    Instruction,
    Recv,
    Run,
    Send,
    task_text,
    writes,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A numbered buffer of a stream: its type, and a name for messages and traces."""

    type: BufferType
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """The work of one mesh in one step; `buffers[i]` describes buffer number i.

    `process` is the index of the process that runs it, 0 where there is one only.
    """

    mesh: str
    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]
    process: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelSpec:
    """One direction between two meshes; message k arrives as a buffer of type `types[k]`."""

    source: str
    target: str
    types: tuple[BufferType, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """All streams of one step.

    Attributes:
        name: name of the entry function.
        streams: one per mesh, in the order in which the graph first names the meshes.
        channels: `Send` and `Recv` name them by position.
        inputs: the user's flat arguments; one that no mesh uses has no `Feed`.
        outputs: the user's flat results.
    """

    name: str
    streams: tuple[Stream, ...]
    channels: tuple[ChannelSpec, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]

    @functools.cached_property
    def executables(self) -> tuple[tuple[str, str], ...]:
        """The distinct (mesh, executable) pairs, in the order of their first call."""
        pairs = {
            (stream.mesh, op.executable): None
            for stream in self.streams
            for op in stream.instructions
            if isinstance(op, Run)
        }
        return tuple(pairs)

    def part(self, process: int) -> Program:
        """The streams of one process.  The messages of others are missing: it cannot be verified."""
        own = tuple(stream for stream in self.streams if stream.process == process)
        return dataclasses.replace(self, streams=own)

    @functools.cached_property
    def between_processes(self) -> frozenset[int]:
        """The channels between meshes of different processes: the receiver may read a buffer later."""
        of_mesh = {stream.mesh: stream.process for stream in self.streams}
        return frozenset(
            number
            for number, channel in enumerate(self.channels)
            if of_mesh.get(channel.source) != of_mesh.get(channel.target)
        )

    @functools.cached_property
    def results(self) -> dict[int, tuple[int, BufferType]]:
        """For each flat result its process, and its type on the mesh that computes it."""
        found: dict[int, tuple[int, BufferType]] = {}
        for stream in self.streams:
            received = {op.buffer for op in stream.instructions if isinstance(op, Recv)}
            for op in stream.instructions:
                if isinstance(op, Fetch) and (op.output not in found or op.buffer not in received):
                    found[op.output] = stream.process, stream.buffers[op.buffer].type
        return found

    @functools.cached_property
    def donated_inputs(self) -> tuple[int, ...]:
        """The flat user arguments that the step may consume, ascending."""
        return tuple(sorted(spec.index for spec in self.inputs if spec.donated))

    @functools.cached_property
    def num_instructions(self) -> int:
        """Instructions over all meshes."""
        return sum(len(stream.instructions) for stream in self.streams)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the program; equal in every process that built it from the same graph."""
        return hashlib.sha256(self._listing().encode()).hexdigest()[:16]

    def as_text(self) -> str:
        """The listing: channels with their messages, then every stream, one instruction a line."""
        return f"program {self.name} fingerprint {self.fingerprint}\n{self._listing()}"

    def _listing(self) -> str:
        several = any(stream.process for stream in self.streams)
        lines = [f"  input {s.index} {s.path}{' donated' if s.donated else ''}" for s in self.inputs]
        lines += [f"  output {s.index} {s.path}" for s in self.outputs]
        for number, channel in enumerate(self.channels):
            between = " between processes" if number in self.between_processes else ""
            lines.append(f"channel {number}: {channel.source} -> {channel.target} tagged{between}")
            lines += [f"  message {k}: {type_}" for k, type_ in enumerate(channel.types)]
        for stream in self.streams:
            where = f" in process {stream.process}" if several else ""
            lines.append(f"mesh {stream.mesh}{where}: {len(stream.instructions)} instructions")
            width = len(str(len(stream.instructions)))
            lines += [
                f"  {at:{width}} {instruction_text(op, stream.buffers)}"
                for at, op in enumerate(stream.instructions)
            ]
        return "\n".join(lines) + "\n"


def instruction_text(op: Instruction, buffers: Sequence[Buffer] = ()) -> str:
    """One instruction as a line; with `buffers` the types and names of its results are shown."""
    made = ", ".join(_definition(number, buffers) for number in writes(op))
    match op:
        case Run():
            arguments = ", ".join(
                f"donate %{b}" if k in op.donated else f"%{b}" for k, b in enumerate(op.inputs)
            )
            task, label = task_text(op), f'"{op.label}"' if op.label else ""
            note = " ".join(filter(None, (task, label)))
            left = f"{made} = " if made else ""
            return f"{left}run {op.executable}({arguments})" + (f"  # {note}" if note else "")
        case Send():
            return f"send %{op.buffer} over channel {op.channel} message {op.sequence}"
        case Recv():
            return f"{made} = recv channel {op.channel} message {op.sequence}"
        case Copy():
            return f"{made} = copy %{op.source}"
        case Free():
            return "free " + ", ".join(f"%{b}" for b in op.buffers)
        case Feed():
            return f"{made} = feed input {op.input}{' fresh' if op.fresh else ''}"
        case Fetch():
            return f"fetch %{op.buffer} as output {op.output}"


def _definition(number: int, buffers: Sequence[Buffer]) -> str:
    if not 0 <= number < len(buffers):
        return f"%{number}"
    buffer = buffers[number]
    return f"%{number}: {buffer.type}" + (f" {buffer.name!r}" if buffer.name else "")
