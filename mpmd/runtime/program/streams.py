"""A program: one straight-line stream per mesh, the channels between them, and the edges of the step.

A stream is the work of one mesh in one step, in order.  It has seven instructions and no branches.  Buffers
are numbers that count from 0 in each stream, each defined by one instruction.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

from mpmd.brief import brief, card, counted, few
from mpmd.runtime.program.graph import BufferType, InputSpec, OutputSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Call an executable: reads `inputs`, consumes those at the positions `donated`, defines `outputs`."""

    executable: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()
    stage: int | None = None
    microbatch: int | None = None
    phase: str = ""
    label: str = ""
    with_forward: bool = False

    __repr__ = brief


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Offer a buffer as message number `sequence` of a channel."""

    buffer: int
    channel: int
    sequence: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recv:
    """Define a buffer: message number `sequence` of a channel."""

    buffer: int
    channel: int
    sequence: int


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Define `buffer` as a copy of `source` on the same mesh, in the memory that its type names."""

    source: int
    buffer: int


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Drop the references to buffers that are not used any more."""

    buffers: tuple[int, ...]

    __repr__ = brief


@dataclasses.dataclass(frozen=True, slots=True)
class Feed:
    """Define a buffer: the flat user argument `input`, placed on the mesh.

    With `fresh` the buffer never shares memory with the user's array: the stream may consume it although
    the user keeps the array.
    """

    buffer: int
    input: int
    fresh: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """A buffer becomes the flat user result `output`; it stays until the stream ends."""

    buffer: int
    output: int


Instruction = Run | Send | Recv | Copy | Free | Feed | Fetch


def reads(op: Instruction) -> tuple[int, ...]:
    """The buffers that must be alive when `op` is issued, in order, repetitions kept."""
    match op:
        case Run():
            return op.inputs
        case Send() | Fetch():
            return (op.buffer,)
        case Copy():
            return (op.source,)
        case Free():
            return op.buffers
    return ()


def writes(op: Instruction) -> tuple[int, ...]:
    """The buffers that `op` defines."""
    match op:
        case Run():
            return op.outputs
        case Recv() | Copy() | Feed():
            return (op.buffer,)
    return ()


def between_memories(op: Copy, stream: Stream) -> tuple[BufferType, BufferType] | None:
    """The types of both ends of a copy between device and host memory; None within one memory."""
    source, target = stream.buffers[op.source].type, stream.buffers[op.buffer].type
    return (source, target) if source.memory_kind != target.memory_kind else None


def donated_buffers(op: Instruction) -> tuple[int, ...]:
    """The buffers that `op` consumes."""
    if not isinstance(op, Run):
        return ()
    return tuple(op.inputs[k] for k in op.donated if k < len(op.inputs))


def ended_buffers(op: Instruction) -> tuple[int, ...]:
    """The buffers that end when `op` is issued: donated or freed."""
    return op.buffers if isinstance(op, Free) else donated_buffers(op)


def task_text(op: Run) -> str:
    """Stage, microbatch and phase of a call in words, such as "F stage 1 microbatch 3"; may be empty."""
    parts = [op.phase] if op.phase else []
    if op.stage is not None:
        parts.append(f"stage {op.stage}")
    if op.microbatch is not None:
        parts.append(f"microbatch {op.microbatch}")
    return " ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A numbered buffer of a stream: its type, and a name for messages and traces."""

    type: BufferType
    name: str

    __repr__ = brief


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """The work of one mesh in one step; `buffers[i]` describes buffer number i.

    `processes` are the indices of those that run it: several where its mesh has devices in several.
    """

    mesh: str
    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]
    processes: tuple[int, ...] = (0,)

    __repr__ = brief


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelSpec:
    """One direction between two meshes; message k arrives as a buffer of type `types[k]`."""

    source: str
    target: str
    types: tuple[BufferType, ...]

    __repr__ = brief


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

    def __repr__(self) -> str:
        runs = sum(isinstance(op, Run) for stream in self.streams for op in stream.instructions)
        messages = sum(len(channel.types) for channel in self.channels)
        rows = [
            ("streams", few(f"{stream.mesh} {len(stream.instructions):,}" for stream in self.streams)),
            ("instructions", f"{self.num_instructions:,}, {runs:,} of them calls of fragments"),
            ("messages", f"{messages:,} over {counted(len(self.channels), 'channel')}"),
            ("edges", f"{counted(len(self.inputs), 'input')}, {counted(len(self.outputs), 'output')}"),
        ]
        return card(f"Program {self.name!r}", rows)

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
        own = tuple(stream for stream in self.streams if process in stream.processes)
        return dataclasses.replace(self, streams=own)

    @functools.cached_property
    def between_processes(self) -> frozenset[int]:
        """The channels that are not within one process: the receiver may read a buffer later."""
        return frozenset(k for k, (sources, targets) in self._channel_ends if len(sources | targets) > 1)

    @functools.cached_property
    def posted(self) -> frozenset[int]:
        """The channels between meshes without a common process: a receive there does not wait."""
        return frozenset(k for k, (sources, targets) in self._channel_ends if not sources & targets)

    @functools.cached_property
    def _channel_ends(self) -> list[tuple[int, tuple[frozenset[int], frozenset[int]]]]:
        """For each channel the processes of both its meshes."""
        of_mesh = {stream.mesh: frozenset(stream.processes) for stream in self.streams}
        nowhere = frozenset({-1})
        ends = [
            (of_mesh.get(channel.source, nowhere), of_mesh.get(channel.target, nowhere))
            for channel in self.channels
        ]
        return list(enumerate(ends))

    @functools.cached_property
    def results(self) -> dict[int, tuple[tuple[int, ...], BufferType]]:
        """For each flat result its processes, and its type on the mesh that computes it."""
        by_result: dict[int, tuple[tuple[int, ...], BufferType]] = {}
        for stream in self.streams:
            received = {op.buffer for op in stream.instructions if isinstance(op, Recv)}
            for op in stream.instructions:
                if isinstance(op, Fetch) and (op.output not in by_result or op.buffer not in received):
                    by_result[op.output] = stream.processes, stream.buffers[op.buffer].type
        return by_result

    @functools.cached_property
    def donated_inputs(self) -> tuple[int, ...]:
        """The flat user arguments that the step may consume, ascending."""
        return tuple(sorted(spec.index for spec in self.inputs if spec.donated))

    @functools.cached_property
    def num_instructions(self) -> int:
        return sum(len(stream.instructions) for stream in self.streams)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the program; equal in every process that built it from the same graph."""
        return hashlib.sha256(self._listing().encode()).hexdigest()[:16]

    def as_text(self) -> str:
        """The listing: channels with their messages, then every stream, one instruction a line."""
        return f"program {self.name} fingerprint {self.fingerprint}\n{self._listing()}"

    def _listing(self) -> str:
        several = len({process for stream in self.streams for process in stream.processes}) > 1
        lines = [f"  input {s.index} {s.path}{' donated' if s.donated else ''}" for s in self.inputs]
        lines += [f"  output {s.index} {s.path}" for s in self.outputs]
        for number, channel in enumerate(self.channels):
            between = " between processes" if number in self.between_processes else ""
            lines.append(f"channel {number}: {channel.source} -> {channel.target} tagged{between}")
            lines += [f"  message {k}: {type_}" for k, type_ in enumerate(channel.types)]
        for stream in self.streams:
            where = f" in {processes_text(stream.processes)}" if several else ""
            lines.append(f"mesh {stream.mesh}{where}: {len(stream.instructions)} instructions")
            width = len(str(len(stream.instructions)))
            lines += [
                f"  {at:{width}} {instruction_text(op, stream.buffers)}"
                for at, op in enumerate(stream.instructions)
            ]
        return "\n".join(lines) + "\n"


def processes_text(processes: Sequence[int]) -> str:
    """Some processes by their indices: `process 0`, `processes 0, 1`."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def instruction_text(op: Instruction, buffers: Sequence[Buffer] = ()) -> str:
    """One instruction as a line; with `buffers` the types and names of its results are shown."""
    definitions = ", ".join(_definition(number, buffers) for number in writes(op))
    match op:
        case Run():
            arguments = ", ".join(
                f"donate %{b}" if k in op.donated else f"%{b}" for k, b in enumerate(op.inputs)
            )
            left = f"{definitions} = " if definitions else ""
            return f"{left}run {op.executable}({arguments}){_note(op)}"
        case Send():
            return f"send %{op.buffer} over channel {op.channel} message {op.sequence}"
        case Recv():
            return f"{definitions} = recv channel {op.channel} message {op.sequence}"
        case Copy():
            return f"{definitions} = copy %{op.source}"
        case Free():
            return "free " + ", ".join(f"%{b}" for b in op.buffers)
        case Feed():
            return f"{definitions} = feed input {op.input}{' fresh' if op.fresh else ''}"
        case Fetch():
            return f"fetch %{op.buffer} as output {op.output}"


def run_text(op: Run) -> str:
    """A call as a line without its buffers, of which there may be hundreds."""
    return f"run {op.executable}{_note(op)}"


def _note(op: Run) -> str:
    note = " ".join(filter(None, (task_text(op), f'"{op.label}"' if op.label else "")))
    return f"  # {note}" if note else ""


def _definition(number: int, buffers: Sequence[Buffer]) -> str:
    if not 0 <= number < len(buffers):
        return f"%{number}"
    buffer = buffers[number]
    return f"%{number}: {buffer.type}" + (f" {buffer.name!r}" if buffer.name else "")
