"""From the exported graph to one instruction stream per mesh.

Per mesh the fragments keep their order in the graph.  Around them are:

* `Feed` for every argument the mesh uses, before everything else, so that arguments are placed before
  anything can consume them.  A transferred argument is fed to another mesh of the process directly,
  and a scalar to the meshes of all.
* `Recv` right before the first use; one from another process a task earlier, so that it arrives during it,
  and so a `Copy` from host memory for a task.
* `Send` right after the buffer is defined, in the order of the transfers.
* `Copy` where a fragment consumes a buffer that is needed afterwards, or that another process may still read.
* `Free` right after the last use; nothing for a consumed buffer.
* `Fetch` after everything else, in the order of the results; a value that is two results is copied.

A value without a use is not moved.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from mpmd.runtime.channels.everywhere import with_results_everywhere
from mpmd.runtime.program.graph import BufferType, CallNode, EntryGraph, InputSpec, TransferOp, check_graph
from mpmd.runtime.program.streams import (
    Buffer,
    ChannelSpec,
    Copy,
    Feed,
    Fetch,
    Free,
    Instruction,
    Program,
    Recv,
    Run,
    Send,
    Stream,
    donated_buffers,
    reads,
    writes,
)
from mpmd.runtime.program.verify_streams import verify


def linearize(
    graph: EntryGraph,
    processes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    replicated: Collection[int] = (),
) -> Program:
    """Builds the program of the exported entry function and verifies it.

    Args:
        graph: the exported entry function.
        processes: for each mesh the indices of its processes; empty if there is one process.  An argument
            is read by the processes of its own mesh only, and sent to meshes of others; a scalar is read by
            all that use it, since every process gets the scalar results.
        replicated: positions of other results that every process gets.

    Raises:
        ProgramError: the graph is not a program; every finding is listed.
    """
    check_graph(graph)
    program = _StreamLayout(with_results_everywhere(graph, processes, replicated), processes).build()
    program = dataclasses.replace(program, outputs=graph.outputs)
    verify(program)
    return program


class _StreamLayout:
    """Lays out the streams of one graph; until the last step instructions name graph values."""

    def __init__(self, graph: EntryGraph, processes: Mapping[str, tuple[int, ...]]) -> None:
        self.graph, self.processes = graph, processes
        self.types = dict(graph.types)
        self.fresh = itertools.count(max(self.types, default=-1) + 1)
        self.names: dict[int, str] = {}
        self.argument: dict[int, InputSpec] = {}  # fed value -> its argument
        self.bodies: dict[str, list[Instruction]] = {}
        self.feeds: dict[str, dict[int, Feed]] = {}
        self.numbers: dict[tuple[str, str], int] = {}  # (source mesh, target mesh) -> channel
        self.messages: list[list[BufferType]] = []
        self.message: dict[int, tuple[int, int]] = {}  # received value -> (channel, sequence)
        self.placed: set[int] = set()  # values whose defining instruction is in a body
        self.consumed: set[int] = set()  # fed values that a fragment consumes
        self.leaving: dict[int, list[TransferOp]] = {}  # value -> its transfers to other meshes
        for spec in graph.inputs:
            self.argument[spec.value] = spec
            self.names[spec.value] = spec.path
            self._mesh(self.types[spec.value].mesh)
        self._sort_transfers()

    def _same_process(self, op: TransferOp) -> bool:
        """Whether both meshes of a transfer are in one process."""
        source, target = self.types[op.source].mesh, self.types[op.target].mesh
        return len({*self._processes_of(source), *self._processes_of(target)}) == 1

    def _processes_of(self, mesh: str) -> tuple[int, ...]:
        return self.processes.get(mesh, (0,))

    def _leaves_process(self, value: int) -> bool:
        """Whether a value is sent to another process, which may read it after the step has ended."""
        return any(not self._same_process(op) for op in self.leaving.get(value, ()))

    def _mesh(self, mesh: str) -> list[Instruction]:
        self.feeds.setdefault(mesh, {})
        return self.bodies.setdefault(mesh, [])

    def _sort_transfers(self) -> None:
        """Separates arguments of other meshes, needed messages and superfluous transfers."""
        # Backwards, as a transfer is needed only if its result is.
        needed = {spec.value for spec in self.graph.outputs}
        for op in reversed(self.graph.ops):
            if isinstance(op, CallNode):
                needed.update(op.inputs)
            elif op.target in needed:
                needed.add(op.source)
        self.copies: dict[int, TransferOp] = {}
        for op in self.graph.ops:
            if isinstance(op, CallNode) or op.target not in needed:
                continue
            if op.source in self.argument and (self._same_process(op) or not self.types[op.source].shape):
                self.argument[op.target] = self.argument[op.source]
                self.names[op.target] = self.names[op.source]
            elif self.types[op.source].mesh == self.types[op.target].mesh:
                self.copies[op.target] = op
            else:
                self.leaving.setdefault(op.source, []).append(op)

    def build(self) -> Program:
        for op in self.graph.ops:
            if isinstance(op, CallNode):
                self._call(op)
            elif op.target in self.copies:
                self._need(op.source)
                self._place(self.types[op.target].mesh, Copy(op.source, op.target))
            elif op in self.leaving.get(op.source, ()):
                self._need(op.source)
        for spec in self.graph.outputs:
            self._need(spec.value)
        fetched: set[int] = set()
        for spec in self.graph.outputs:
            value, body = spec.value, self._mesh(self.types[spec.value].mesh)
            # two results are two arrays: one may be donated to the next step, as may one that is still sent
            if value in fetched or self._leaves_process(value):
                value = self._copied(value)
                body.append(Copy(spec.value, value))
            fetched.add(value)
            body.append(Fetch(value, spec.index))
        remote = self._channels_between_processes()
        laid = {mesh: self._copy_before_donation(self._ordered(mesh, remote)) for mesh in self.bodies}
        streams = [
            dataclasses.replace(
                _number(mesh, _free_after_last_use(self._freshened(mesh, body)), self.types, self.names),
                processes=self._processes_of(mesh),
            )
            for mesh, body in laid.items()
            if body
        ]
        channels = tuple(
            ChannelSpec(source, target, tuple(self.messages[number]))
            for (source, target), number in self.numbers.items()
        )
        return Program(self.graph.name, tuple(streams), channels, self.graph.inputs, self.graph.outputs)

    def _channels_between_processes(self) -> frozenset[int]:
        of = {mesh: frozenset(self._processes_of(mesh)) for ends in self.numbers for mesh in ends}
        return frozenset(number for (a, b), number in self.numbers.items() if not of[a] & of[b])

    def _ordered(self, mesh: str, remote: frozenset[int]) -> list[Instruction]:
        feeds = sorted(self.feeds[mesh].values(), key=lambda feed: (feed.input, feed.buffer))
        body = self.bodies[mesh]
        tasks = (op for op in body if isinstance(op, Run) and op.microbatch is not None)
        by_tasks = {value for op in tasks for value in op.inputs}
        waited = {
            op.buffer
            for op in body
            if (isinstance(op, Recv) and op.channel in remote)
            or (isinstance(op, Copy) and op.buffer in by_tasks and self._is_back(op))
        }
        return [*feeds, *_posted_early(body, waited)]

    def _is_back(self, op: Copy) -> bool:
        """Whether it copies from host memory to device memory."""
        return bool(self.types[op.source].memory_kind and not self.types[op.buffer].memory_kind)

    def _call(self, op: CallNode) -> None:
        for value in op.inputs:
            self._need(value)
        fields = (op.stage, op.microbatch, op.phase, op.label, op.with_forward)
        self._place(op.mesh, Run(op.name, op.inputs, op.outputs, op.donated, *fields))

    def _need(self, value: int) -> None:
        """Adds the `Feed` or the `Recv` that defines `value`, if it is missing."""
        mesh = self.types[value].mesh
        if (spec := self.argument.get(value)) is not None:
            self._mesh(mesh)
            if value not in self.feeds[mesh]:
                self.feeds[mesh][value] = Feed(value, spec.index)
                self._send(mesh, value)
        elif value not in self.placed:
            self._place(mesh, Recv(value, *self.message[value]))

    def _place(self, mesh: str, op: Instruction) -> None:
        """Appends `op`, and a `Send` for each transfer of its results to another mesh."""
        self._mesh(mesh).append(op)
        for value in writes(op):
            self.placed.add(value)
            self._send(mesh, value)

    def _send(self, mesh: str, value: int) -> None:
        """Appends a `Send` for each transfer of a value to another mesh."""
        for transfer in self.leaving.get(value, ()):
            target = self.types[transfer.target]
            number = self.numbers.setdefault((mesh, target.mesh), len(self.numbers))
            if number == len(self.messages):
                self.messages.append([])
            self.message[transfer.target] = (number, len(self.messages[number]))
            self._mesh(mesh).append(Send(value, number, len(self.messages[number])))
            self.messages[number].append(target)

    def _copy_before_donation(self, body: Sequence[Instruction]) -> list[Instruction]:
        """Makes every donation legal: of a buffer's last use, passed once, and owned by the stream alone."""
        last = _last_use(body)
        sent: set[int] = set()  # to another process, which may still read it
        result: list[Instruction] = []
        for at, op in enumerate(body):
            if isinstance(op, Send) and self._leaves_process(op.buffer):
                sent.add(op.buffer)
            if isinstance(op, Run) and op.donated:
                arguments = list(op.inputs)
                for k in op.donated:
                    value = op.inputs[k]
                    if last[value] > at or arguments.count(value) > 1 or value in sent:
                        arguments[k] = self._copied(value)
                        result.append(Copy(value, arguments[k]))
                    # An argument is consumed where it was placed: `_freshened` gives other feeds of it
                    # buffers of their own.
                    elif value in self.argument:
                        self.consumed.add(value)
                op = dataclasses.replace(op, inputs=tuple(arguments))
            result.append(op)
        return result

    def _freshened(self, mesh: str, body: Sequence[Instruction]) -> list[Instruction]:
        """Separates buffers that a fragment consumes from those that the user or another mesh still reads.

        Only the argument's own mesh may consume the user's array itself, and only if the user donated it;
        every other feed of an argument that a mesh of its processes consumes is a buffer of its own.  All
        feeds are issued before any run.
        """
        here = {*self._processes_of(mesh)}
        beside = (v for v in self.consumed if here & {*self._processes_of(self.types[v].mesh)})
        consumed = {self.argument[value].index for value in beside}

        def shared(op: Feed) -> bool:
            spec = self.argument[op.buffer]
            if self._leaves_process(op.buffer):
                return True
            if op.buffer == spec.value:
                return op.buffer in self.consumed and not spec.donated
            return spec.index in consumed

        return [dataclasses.replace(op, fresh=shared(op)) if isinstance(op, Feed) else op for op in body]

    def _copied(self, value: int) -> int:
        copy = next(self.fresh)
        self.types[copy] = self.types[value]
        self.names[copy] = self.names.get(value, "")
        return copy


def _posted_early(body: Sequence[Instruction], waited: Collection[int]) -> list[Instruction]:
    """Moves what defines some buffers before the task that precedes its use, unless that defines its operand.

    A receive from another process or a copy from host memory does not wait, so no order of them can stop the
    program.  It costs the memory of one buffer more: it is not moved further.
    """
    result: list[Instruction] = []
    task = -1  # position of the last task in the result
    defined: dict[int, int] = {}  # value -> how many tasks had begun
    tasks = 0
    for op in body:
        early = any(value in waited for value in writes(op)) and task >= 0
        if early and all(defined.get(value, 0) < tasks for value in reads(op)):
            result.insert(task, op)
            task += 1
            continue
        if isinstance(op, Run) and op.microbatch is not None:
            task, tasks = len(result), tasks + 1
        defined.update(dict.fromkeys(writes(op), tasks))
        result.append(op)
    return result


def _last_use(body: Sequence[Instruction]) -> dict[int, int]:
    """For each value the position of its last reader, or of its definition if nothing reads it."""
    last: dict[int, int] = {}
    for at, op in enumerate(body):
        for value in (*reads(op), *writes(op)):
            last[value] = at
    return last


def _free_after_last_use(body: Sequence[Instruction]) -> list[Instruction]:
    last = _last_use(body)
    kept = {op.buffer for op in body if isinstance(op, Fetch)}
    result: list[Instruction] = []
    for at, op in enumerate(body):
        result.append(op)
        gone = kept.union(donated_buffers(op))
        ended = [v for v in dict.fromkeys((*reads(op), *writes(op))) if last[v] == at and v not in gone]
        if ended:
            result.append(Free(tuple(ended)))
    return result


def _number(
    mesh: str, body: Sequence[Instruction], types: dict[int, BufferType], names: dict[int, str]
) -> Stream:
    """Turns graph values into the stream's own numbers, counted in the order of definition."""
    number = {value: k for k, value in enumerate(v for op in body for v in writes(op))}
    buffers = tuple(Buffer(types[value], names.get(value, "")) for value in number)

    def many(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[v] for v in values)

    def renamed(op: Instruction) -> Instruction:
        match op:
            case Run():
                return dataclasses.replace(op, inputs=many(op.inputs), outputs=many(op.outputs))
            case Free():
                return Free(many(op.buffers))
            case Copy():
                return Copy(number[op.source], number[op.buffer])
        return dataclasses.replace(op, buffer=number[op.buffer])

    return Stream(mesh, buffers, tuple(renamed(op) for op in body))
