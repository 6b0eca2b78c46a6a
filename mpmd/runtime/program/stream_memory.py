"""Bytes of every mesh during a step: predicted from its stream, and measured while it runs.

Both count the same: the buffers that the stream holds at each instruction.  A buffer counts from the
instruction that defines it to the one that ends it; a consumed buffer becomes a result of its run and is
counted once.  An argument counts from the start of the step: it is on the mesh before anything runs.
Native fragments keep their scratch memory from call to call: all of it counts all the time.
Host memory does not count: what lies there is in `host_bytes`.
Besides, messages may be on their way: bytes at the receiver that no buffer of the stream names yet.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mpmd.brief import bytes_text, card
from mpmd.jax_compat import default_memory_kind
from mpmd.runtime.program.streams import (
    Copy,
    Feed,
    Fetch,
    Free,
    Instruction,
    Program,
    Recv,
    Run,
    Stream,
    donated_buffers,
    ended_buffers,
    instruction_text,
    run_text,
    writes,
)
from mpmd.runtime.program.verify_streams import verify
from mpmd.runtime.run.interpreter import BoundFeed, BoundInstruction, Observer, StepState

_SCRATCH = ("kept", "workspace")


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """A buffer that is held at the peak."""

    name: str
    category: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class MeshMemory:
    """Bytes that a mesh holds over a step, all its devices together.

    Attributes:
        mesh: its name.
        peak_bytes: the maximum of bytes held at once, with workspace and kept scratch memory.
        position, instruction: the first position of the peak; of a call its name and its task.
        holders: the buffers at the peak, largest first.
        workspace_bytes: scratch memory that the fragment at the peak takes and returns.
        kept_bytes: scratch memory that the mesh's fragments keep from call to call.
        in_flight_bytes: a bound for bytes of messages sent to the mesh and not yet received.
        curve: per instruction the maximum of bytes held while it is issued.
        host_bytes: the maximum of bytes held at once in host memory, of all its devices together.
    """

    mesh: str
    peak_bytes: int
    position: int
    instruction: str
    holders: tuple[Holder, ...]
    workspace_bytes: int
    kept_bytes: int
    in_flight_bytes: int
    curve: tuple[int, ...]
    host_bytes: int = 0

    def __repr__(self) -> str:
        held = ", ".join(
            f"{category} {bytes_text(size)}"
            for category, size in sorted(self.by_category.items(), key=lambda of: -of[1])
            if size
        )
        rows = [
            ("held there", held),
            ("reached at", f"instruction {self.position}: {self.instruction}" if self.instruction else ""),
            ("on their way", f"at most {bytes_text(self.in_flight_bytes)}" if self.in_flight_bytes else ""),
            ("on the host", bytes_text(self.host_bytes) if self.host_bytes else ""),
        ]
        return card(f"MeshMemory of {self.mesh}: at most {bytes_text(self.peak_bytes)}", rows)

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes held at the peak by category, names in order; together they are the peak."""
        total = collections.Counter({"kept": self.kept_bytes, "workspace": self.workspace_bytes})
        for holder in self.holders:
            total[holder.category] += holder.bytes
        return {name: size for name, size in sorted(total.items()) if size or name not in _SCRATCH}


def predict_memory(
    program: Program,
    workspace: Mapping[tuple[str, str], int] | None = None,
    kept: Mapping[str, int] | None = None,
) -> tuple[MeshMemory, ...]:
    """Predicts the memory of every stream of a program.

    Args:
        program: a valid program.
        workspace: scratch bytes by (mesh, executable) while it runs, where known.
        kept: scratch bytes by mesh that are held all the time, where known.

    Cost: linear in the instructions.
    """
    order = verify(program)
    in_flight = dict.fromkeys((s.mesh for s in program.streams), 0)
    for channel, count in zip(program.channels, order.occupancy, strict=True):
        in_flight[channel.target] += count * max((t.bytes for t in channel.types), default=0)
    kept = kept or {}
    return tuple(
        _traverse(s, workspace or {}, kept.get(s.mesh, 0), in_flight[s.mesh]) for s in program.streams
    )


def peak_and_freed(program: Program, workspace: Mapping[tuple[str, str], int]) -> tuple[int, int]:
    """The peaks of all meshes together, and how many bytes of them are free again after a step.

    Results, and arguments that the step does not consume, belong to the user and stay.

    Args:
        program: a valid program.
        workspace: see `predict_memory`.
    """
    peak = freed = 0
    for stream in program.streams:
        memory = _traverse(stream, workspace, 0, 0)
        stay = {op.buffer for op in stream.instructions if isinstance(op, Feed | Fetch)}
        stay.difference_update(*(donated_buffers(op) for op in stream.instructions if isinstance(op, Run)))
        peak += memory.peak_bytes
        freed += max(0, memory.peak_bytes - sum(stream.buffers[b].type.device_bytes for b in stay))
    return peak, freed


def held_bytes(stream: Stream, workspace: Mapping[tuple[str, str], int], kept: int = 0) -> list[int]:
    """Per instruction the maximum of bytes held while it is issued."""
    size = [buffer.type.device_bytes for buffer in stream.buffers]
    fed = [op.buffer for op in stream.instructions if isinstance(op, Feed)]
    live = kept + sum(size[b] for b in fed)
    curve: list[int] = []
    for op in stream.instructions:
        if isinstance(op, Run):
            before = live
            live += sum([size[b] for b in op.outputs]) - sum([size[b] for b in donated_buffers(op)])
            curve.append(max(before, live) + workspace.get((stream.mesh, op.executable), 0))
            continue
        if isinstance(op, Recv | Copy):
            live += size[op.buffer]
        curve.append(live)
        if isinstance(op, Free):
            live -= sum([size[b] for b in op.buffers])
    return curve


def _held_on_host(stream: Stream) -> int:
    """The maximum of bytes held at once in host memory."""
    size = [buffer.type.bytes - buffer.type.device_bytes for buffer in stream.buffers]
    if not any(size):
        return 0
    most = live = sum(size[op.buffer] for op in stream.instructions if isinstance(op, Feed))
    for op in stream.instructions:
        if not isinstance(op, Feed):
            live += sum(size[b] for b in writes(op))
            most = max(most, live)
        live -= sum(size[b] for b in ended_buffers(op))
    return most


def _traverse(
    stream: Stream, workspace: Mapping[tuple[str, str], int], kept: int, in_flight: int
) -> MeshMemory:
    curve = held_bytes(stream, workspace, kept)
    peak = max(curve, default=0)
    position = curve.index(peak) if curve else 0
    scratch, text = 0, ""
    if curve:
        op = stream.instructions[position]
        text = run_text(op) if isinstance(op, Run) else instruction_text(op)
        scratch = workspace.get((stream.mesh, op.executable), 0) if isinstance(op, Run) else 0
    holders = _holders(stream, position)
    return MeshMemory(
        stream.mesh,
        peak,
        position,
        text,
        holders,
        scratch,
        kept,
        in_flight,
        tuple(curve),
        _held_on_host(stream),
    )


def _holders(stream: Stream, position: int) -> tuple[Holder, ...]:
    """The buffers held at a position: with the results of a run, or with its consumed buffers if larger."""
    alive = dict.fromkeys(op.buffer for op in stream.instructions if isinstance(op, Feed))
    for at, op in enumerate(stream.instructions[: position + 1]):
        if at == position and isinstance(op, Run):
            gain = sum(stream.buffers[b].type.device_bytes for b in op.outputs)
            if gain < sum(stream.buffers[b].type.device_bytes for b in donated_buffers(op)):
                break
        alive.update(dict.fromkeys(writes(op)))
        for b in donated_buffers(op) if at == position else ended_buffers(op):
            alive.pop(b, None)
    categories = buffer_categories(stream)
    held = [
        Holder(stream.buffers[b].name or f"%{b}", categories[b], stream.buffers[b].type.bytes)
        for b in alive
        if not stream.buffers[b].type.memory_kind
    ]
    return tuple(sorted(held, key=lambda h: (-h.bytes, h.name)))


def buffer_categories(stream: Stream) -> list[str]:
    """For each buffer of a stream its category, as far as the stream shows it.

    "argument", "received", "result" of the step, "activation" (of a forward task), "gradient" (of a backward
    task or a reduction), "gathered" (weights that are whole for a while), "copy" or "other".
    """
    results = {op.buffer for op in stream.instructions if isinstance(op, Fetch)}
    categories = ["other"] * len(stream.buffers)
    for op in stream.instructions:
        for b in writes(op):
            categories[b] = "result" if b in results and not isinstance(op, Feed) else _category(op)
    return categories


_EXCHANGE = re.compile(r"p\d+_(gather|reduce)\.")
_MADE_BY = collections.defaultdict(
    lambda: "other",
    {"F": "activation", **dict.fromkeys(("B", "I", "W", "reduce"), "gradient"), "gather": "gathered"},
)


def _category(op: Instruction) -> str:
    match op:
        case Feed():
            return "argument"
        case Recv():
            return "received"
        case Copy():
            return "copy"
        case Run():
            exchange = _EXCHANGE.match(op.executable)
            return _MADE_BY[exchange[1] if exchange and not op.phase else op.phase]
    return "other"


class MemoryMeter(Observer):
    """Observes a step and counts the bytes of the arrays that the streams hold after every instruction.

    Attributes:
        curves: per mesh the bytes held after each instruction other than a feed.
        peaks: per mesh the maximum of bytes held.
    """

    def __init__(self, program: Program) -> None:
        self.curves: dict[str, list[int]] = {stream.mesh: [] for stream in program.streams}
        self.peaks: dict[str, int] = dict.fromkeys(self.curves, 0)
        self._ranges: dict[str, range] = {}
        start = 0
        for stream in program.streams:
            self._ranges[stream.mesh] = range(start, start + len(stream.buffers))
            start += len(stream.buffers)

    def issued(self, instruction: BoundInstruction, frame: StepState) -> None:
        """Counts the bytes that the mesh of the instruction holds now."""
        if isinstance(instruction, BoundFeed):
            return
        held = {id(a): a for i in self._ranges[instruction.mesh] if (a := frame.slots[i]) is not None}
        size = sum(bytes_on_mesh(a) for a in held.values() if not (a.is_deleted() or in_host_memory(a)))
        self.curves[instruction.mesh].append(size)
        self.peaks[instruction.mesh] = max(self.peaks[instruction.mesh], size)


def in_host_memory(array: Any) -> bool:
    """Whether an array is in another memory than its devices' own."""
    sharding = getattr(array, "sharding", None)
    return sharding is not None and sharding.memory_kind not in (None, default_memory_kind(sharding))


def bytes_on_mesh(array: Any) -> int:
    """Bytes of an array over all its devices, every replica counted."""
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        return int(array.nbytes)
    count = len(sharding.device_set)
    for size in sharding.shard_shape(array.shape):
        count *= size
    return int(count * array.dtype.itemsize)
