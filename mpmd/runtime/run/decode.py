"""Turns a program into steps that can be issued: instructions bound to what they call.

A call also gets a limit of calls of its mesh that may be unfinished when it is issued, so that memory stays
near its prediction.  XLA on CPU allocates the results of a call when it is issued, and a buffer is freed only
when the last call that reads it has ended.  A mesh to which a whole step is issued at once holds the
residuals of all microbatches together, in spite of its schedule.  So a call whose results would not fit
beside the live buffers waits for earlier calls to end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from mpmd.errors import ProgramError, collect
from mpmd.runtime.channels.protocol import Channel
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.pairs import MessageKey
from mpmd.runtime.program.streams import (
    Copy,
    Feed,
    Fetch,
    Free,
    Program,
    Recv,
    Run,
    Send,
    Stream,
    donated_buffers,
    reads,
    writes,
)
from mpmd.runtime.run.interpreter import (
    BoundCall,
    BoundCopy,
    BoundFeed,
    BoundFetch,
    BoundFree,
    BoundInstruction,
    BoundRecv,
    BoundSend,
    FragmentExecutable,
    PendingCalls,
)


class ArrayEngine(Protocol):
    """Operations on arrays: places, copies and moves them, without waiting for them."""

    def placer(self, type_: BufferType, path: str, *, fresh: bool) -> Callable[[Any], Any]:
        """The function of a `Feed`; `path` is the user's name of the argument."""

    def copier(self, source: BufferType, target: BufferType) -> Callable[[Any], Any]:
        """The function of a `Copy`."""

    def paired(self, program: Program) -> Collection[MessageKey]:
        """The messages whose both ends all processes must issue in one order; see `pairs`."""

    def channels(self, program: Program, pairs: Sequence[MessageKey] = ()) -> Callable[[], Sequence[Channel]]:
        """The function that creates all channels of one step, in the program's order; `pairs` in theirs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    """A program ready to be issued.

    Attributes:
        feeds: the feeds of all meshes; issued before everything else.
        streams: per mesh all other instructions.
        pending: per mesh its unfinished calls.
        num_slots: length of the list of slots.
    """

    feeds: tuple[BoundFeed, ...]
    streams: tuple[tuple[BoundInstruction, ...], ...]
    pending: tuple[PendingCalls, ...]
    num_slots: int


def decode(
    program: Program,
    executables: Mapping[tuple[str, str], FragmentExecutable],
    engine: ArrayEngine,
    run_ahead: int,
) -> Decoded:
    """Binds every instruction of `program`.

    Args:
        program: a verified program.
        executables: by (mesh, name).
        engine: places, copies and moves arrays.
        run_ahead: unfinished calls that a mesh may have.

    Raises:
        ProgramError: an executable is missing.
    """
    missing = [
        f"mesh {mesh!r} calls {name!r}"
        for mesh, name in program.executables
        if (mesh, name) not in executables
    ]
    if missing:
        raise collect(
            ProgramError, [f"no executable: {text}" for text in missing], "executables are missing:"
        )
    feeds: list[BoundFeed] = []
    streams: list[tuple[BoundInstruction, ...]] = []
    pending_calls: list[PendingCalls] = []
    paths = {spec.index: spec.path for spec in program.inputs}
    fetches = chosen_fetches(program)
    base = 0
    for stream in program.streams:
        pending = PendingCalls(stream.mesh)
        watched = watched_results(stream)
        watched |= _tokens(stream, watched, executables)
        unwatched = unwatched_sources(stream, watched)
        # A call's end is seen at a result that stays: where none does, at a token, or at a later call that
        # reads its results.
        limits = unfinished_calls(stream, run_ahead)
        binder = _Binder(
            stream, base, executables, engine, pending, watched, unwatched, paths, limits, fetches
        )
        bound = [binder.bind(at) for at in range(len(stream.instructions))]
        feeds += [i for i in bound if isinstance(i, BoundFeed)]
        streams.append(tuple(i for i in bound if not isinstance(i, BoundFeed)))
        pending_calls.append(pending)
        base += len(stream.buffers)
    return Decoded(tuple(feeds), tuple(streams), tuple(pending_calls), base)


def chosen_fetches(program: Program) -> frozenset[tuple[str, int]]:
    """For each result the `Fetch` that gives it, by mesh and position.

    Meshes over several processes may overlap: a process then has a result and a copy that it received.
    """
    chosen: dict[int, tuple[str, int]] = {}
    for stream in program.streams:
        received = {op.buffer for op in stream.instructions if isinstance(op, Recv)}
        for at, op in enumerate(stream.instructions):
            if isinstance(op, Fetch) and (op.output not in chosen or op.buffer not in received):
                chosen[op.output] = stream.mesh, at
    return frozenset(chosen.values())


def watched_results(stream: Stream) -> dict[int, int]:
    """Per position of a `Run`, the result that signals its end: the smallest that no call consumes.

    A consumed array cannot be waited for.  A run all of whose results are consumed later is left out.
    """
    consumed = {b for op in stream.instructions for b in donated_buffers(op)}
    fetched = {op.buffer for op in stream.instructions if isinstance(op, Fetch)}
    chosen = {}
    for at, op in enumerate(stream.instructions):
        if isinstance(op, Run):
            rest = [k for k, b in enumerate(op.outputs) if b not in consumed]
            if rest:
                # A result of the step may be donated by the user: a value inside of the step is preferred.
                chosen[at] = min(
                    rest, key=lambda k: (op.outputs[k] in fetched, stream.buffers[op.outputs[k]].type.bytes)
                )
    return chosen


def _tokens(
    stream: Stream, watched: Mapping[int, int], executables: Mapping[tuple[str, str], FragmentExecutable]
) -> dict[int, int]:
    """Per position of a `Run` without such a result, the token, where its executable gives one."""
    return {
        at: len(op.outputs)
        for at, op in enumerate(stream.instructions)
        if isinstance(op, Run)
        and at not in watched
        and getattr(executables[stream.mesh, op.executable], "has_token", False)
    }


def unwatched_executables(program: Program) -> frozenset[tuple[str, str]]:
    """The (mesh, executable) pairs of which no result of some call can be waited for: they need a token."""
    return frozenset(
        (stream.mesh, op.executable)
        for stream in program.streams
        for watched in [watched_results(stream)]
        for at, op in enumerate(stream.instructions)
        if isinstance(op, Run) and at not in watched
    )


def unwatched_sources(stream: Stream, watched: dict[int, int]) -> dict[int, tuple[str, ...]]:
    """Per position of a `Run` the executables, of runs without a handle, whose failure it may show."""
    maker: dict[int, int] = {}
    sources: dict[int, tuple[str, ...]] = {}
    for at, op in enumerate(stream.instructions):
        if isinstance(op, Run):
            names: dict[str, None] = {}
            for before in dict.fromkeys(maker[b] for b in op.inputs if b in maker):
                run = stream.instructions[before]
                if before not in watched and isinstance(run, Run):
                    names.update(dict.fromkeys((*sources.get(before, ()), run.executable)))
            if names:
                sources[at] = tuple(names)
            maker.update(dict.fromkeys(op.outputs, at))
    return sources


@dataclasses.dataclass(slots=True)
class _Binder:
    stream: Stream
    base: int
    executables: Mapping[tuple[str, str], FragmentExecutable]
    engine: ArrayEngine
    pending: PendingCalls
    watched: dict[int, int]
    unwatched: dict[int, tuple[str, ...]]
    paths: dict[int, str]
    limits: dict[int, int]
    fetches: frozenset[tuple[str, int]]

    def bind(self, at: int) -> BoundInstruction:
        op, mesh, base = self.stream.instructions[at], self.stream.mesh, self.base
        match op:
            case Run():
                executable = self.executables[mesh, op.executable]
                return BoundCall(
                    mesh=mesh,
                    at=at,
                    op=op,
                    execute=executable,
                    inputs=self.shifted(op.inputs),
                    outputs=self.shifted(op.outputs),
                    consumed=self.shifted(donated_buffers(op)),
                    handle=self.watched.get(at),
                    results=len(op.outputs) + getattr(executable, "has_token", False),
                    unwatched=self.unwatched.get(at, ()),
                    pending=self.pending,
                    unfinished=self.limits[at],
                    waits_for_arguments=getattr(executable, "waits_for_arguments", False),
                )
            case Send():
                return BoundSend(mesh, at, base + op.buffer, op.channel, op.sequence)
            case Recv():
                return BoundRecv(mesh, at, base + op.buffer, op.channel, op.sequence)
            case Copy():
                copy = self.engine.copier(self.type(op.source), self.type(op.buffer))
                return BoundCopy(mesh, at, base + op.source, base + op.buffer, copy)
            case Free():
                return BoundFree(mesh, at, self.shifted(op.buffers))
            case Feed():
                place = self.engine.placer(self.type(op.buffer), self.paths[op.input], fresh=op.fresh)
                return BoundFeed(mesh, at, base + op.buffer, op.input, place, self.paths[op.input])
            case Fetch():
                if (mesh, at) not in self.fetches:
                    return BoundFree(mesh, at, ())
                return BoundFetch(mesh, at, base + op.buffer, op.output)

    def type(self, number: int) -> BufferType:
        return self.stream.buffers[number].type

    def shifted(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.base + n for n in numbers)


SLACK_SHARE, SLACK_BYTES = 25, 16 << 20
"""Bytes that calls issued ahead may hold beyond the predicted peak: 1/25 of that, or so many bytes."""


def unfinished_calls(stream: Stream, at_most: int) -> dict[int, int]:
    """Per position of a `Run` the maximum of unfinished calls once it is issued, itself included: 1 or more.

    Args:
        stream: the instructions of a mesh.
        at_most: the upper bound of all of them.

    Cost: linear in the instructions, times `at_most`.
    """
    positions = [at for at, op in enumerate(stream.instructions) if isinstance(op, Run)]
    taken, given_back = _taken_and_given_back(stream)
    peak = max((taken[k] - given_back[k] for k in range(len(positions))), default=0)
    budget = peak + max(peak // SLACK_SHARE, SLACK_BYTES)
    limits = {}
    for k, at in enumerate(positions):
        fits = (n for n in range(at_most, 1, -1) if taken[k] - given_back[max(0, k + 1 - n)] <= budget)
        limits[at] = next(fits, 1)
    return limits


def _taken_and_given_back(stream: Stream) -> tuple[list[int], list[int]]:
    """Per call the bytes allocated before it is issued; per number of calls those freed by their end.

    A consumed buffer becomes a result: it is neither allocated nor freed.
    """
    size = [buffer.type.device_bytes for buffer in stream.buffers]
    total = sum(size[op.buffer] for op in stream.instructions if isinstance(op, Feed))
    last_call: dict[int, int] = {}
    taken: list[int] = []
    back = [0]
    for op in stream.instructions:
        if isinstance(op, Run):
            total += sum(size[b] for b in op.outputs) - sum(size[b] for b in donated_buffers(op))
            taken.append(total)
            back.append(0)
            last_call.update(dict.fromkeys((*reads(op), *op.outputs), len(taken)))
        elif isinstance(op, Free):
            for buffer in op.buffers:
                back[last_call.get(buffer, 0)] += size[buffer]
        elif not isinstance(op, Feed):
            total += sum(size[b] for b in writes(op))
    return taken, list(itertools.accumulate(back))
