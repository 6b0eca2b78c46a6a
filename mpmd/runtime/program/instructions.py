"""The seven instructions of a stream.

A stream is the work of one mesh in one step, in order.  It has no branches.  Buffers are numbers that
count from 0 in each stream, each defined by one instruction.
"""

from __future__ import annotations

import dataclasses


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
