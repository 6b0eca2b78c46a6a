"""Verifies a program before its first step.

Per stream: every buffer is defined once, is alive when it is read, and ends once.  Messages: every send
has its receive, of one type.  Order: no execution deadlocks.  All findings
are reported together, with mesh, position, instruction and buffer.

Cost: linear in instructions and messages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from mpmd.errors import ProgramError, collect
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.order import InstructionOrder, Node, linear_order, message_ends, messages, waits_for
from mpmd.runtime.program.streams import (
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
    instruction_text,
    reads,
    writes,
)


def verify(program: Program) -> InstructionOrder:
    """Checks every rule and returns a legal order of all instructions.

    Raises:
        ProgramError: some rule is broken; the message lists every finding.
    """
    findings = [finding for stream in program.streams for finding in stream_findings(program, stream)]
    findings += edge_findings(program)
    findings += message_findings(program)
    findings += signature_findings(program)
    pairs = messages(program)
    before = waits_for(program, pairs)
    nodes, blocked = linear_order(program, before)
    findings += _deadlock_findings(program, nodes, blocked, before)
    if findings:
        heading = f"program {program.name!r} breaks {len(findings)} rules of its streams:"
        raise collect(ProgramError, findings, heading)
    return InstructionOrder(tuple(nodes), before, pairs, len(program.streams))


def _place(stream: Stream, at: int) -> str:
    return f"{stream.mesh}[{at}] {instruction_text(stream.instructions[at])}"


def _buffer(stream: Stream, number: int) -> str:
    name = stream.buffers[number].name if 0 <= number < len(stream.buffers) else ""
    return f"buffer %{number}" + (f" ({name})" if name else "")


@dataclass
class _StreamCheck:
    """One pass over a stream: buffers that are alive, and buffers that ended, and how."""

    stream: Stream
    between_processes: frozenset[int]
    alive: dict[int, int] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    fetched: set[int] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)

    def report(self, at: int, text: str) -> None:
        self.findings.append(f"{_place(self.stream, at)}: {text}")

    def visit(self, at: int, op: Instruction) -> None:
        for number in dict.fromkeys((*reads(op), *writes(op))):
            if not 0 <= number < len(self.stream.buffers):
                self.report(at, f"{_buffer(self.stream, number)} is not one of the stream's buffers")
        self.read(at, op)
        if isinstance(op, Run):
            self.donate(at, op)
        elif isinstance(op, Send) and op.channel in self.between_processes:
            self.sent[op.buffer] = at
        elif isinstance(op, Fetch):
            self.fetched.add(op.buffer)
        elif isinstance(op, Free):
            for number in op.buffers:
                self.end(number, f"was freed at [{at}]")
        for number in writes(op):
            if number in self.alive:
                defined = self.alive[number]
                self.report(
                    at, f"{_buffer(self.stream, number)} is defined while alive, first at [{defined}]"
                )
            elif number in self.gone:
                self.report(at, f"{_buffer(self.stream, number)} is defined twice; it {self.gone[number]}")
            self.alive[number] = at

    def read(self, at: int, op: Instruction) -> None:
        for number in dict.fromkeys(reads(op)):
            if number not in self.alive:
                how = self.gone.get(number, "is not defined")
                self.report(at, f"{_buffer(self.stream, number)} {how}")
            elif isinstance(op, Free) and number in self.fetched:
                self.report(
                    at, f"{_buffer(self.stream, number)} is freed although it is a result of the step"
                )
        if isinstance(op, Free):
            for number in dict.fromkeys(b for b in op.buffers if op.buffers.count(b) > 1):
                self.report(at, f"{_buffer(self.stream, number)} is freed twice")

    def donate(self, at: int, op: Run) -> None:
        for k in op.donated:
            if not 0 <= k < len(op.inputs):
                self.report(at, f"donates argument {k}, but has {len(op.inputs)} arguments")
        for number in dict.fromkeys(donated_buffers(op)):
            name = _buffer(self.stream, number)
            if op.inputs.count(number) > 1:
                self.report(at, f"{name} is donated and passed twice")
            if number in self.sent:
                sent = self.sent[number]
                self.report(
                    at, f"{name} is donated after it was sent at [{sent}], where the peer may still read it"
                )
            if number in self.fetched:
                self.report(at, f"{name} is donated although it is a result of the step")
            self.end(number, f"was donated at [{at}]")

    def end(self, number: int, how: str) -> None:
        if self.alive.pop(number, None) is not None:
            self.gone[number] = how


def stream_findings(program: Program, stream: Stream) -> list[str]:
    """Each mesh by itself: defined before use, ended once, none left over."""
    check = _StreamCheck(stream, program.between_processes)
    for at, op in enumerate(stream.instructions):
        check.visit(at, op)
    check.findings += [
        f"{stream.mesh}: {_buffer(stream, number)}, defined at [{at}], is neither freed nor a result"
        for number, at in check.alive.items()
        if number not in check.fetched
    ]
    return check.findings


def edge_findings(program: Program) -> list[str]:
    """The user's side: feeds first, known arguments, every result exactly once."""
    findings: list[str] = []
    arguments = {spec.index: spec for spec in program.inputs}
    fetched: dict[tuple[int | str, int], str] = {}  # (process, output); of a received one (mesh, output)
    for stream in program.streams:
        started = False
        received = {op.buffer for op in stream.instructions if isinstance(op, Recv)}
        for at, op in enumerate(stream.instructions):
            if isinstance(op, Feed):
                if started:
                    findings.append(f"{_place(stream, at)}: a feed comes after another kind of instruction")
                if op.input not in arguments:
                    findings.append(f"{_place(stream, at)}: the step has no input {op.input}")
            else:
                started = True
            if isinstance(op, Fetch):
                places = (stream.mesh,) if op.buffer in received else stream.processes
                for key in [(place, op.output) for place in places]:
                    if key in fetched:
                        problem = f"output {op.output} was fetched by {fetched[key]}"
                        findings.append(f"{_place(stream, at)}: {problem}")
                    fetched.setdefault(key, f"{stream.mesh}[{at}]")
    named = {spec.index: spec.path for spec in program.outputs}
    fetched_results = {k for _, k in fetched}
    findings += [
        f"output {k} ({path}) is never fetched" for k, path in named.items() if k not in fetched_results
    ]
    findings += [
        f"{where} fetches output {k}, which the step does not have"
        for (_, k), where in fetched.items()
        if k not in named
    ]
    if sorted(named) != list(range(len(program.outputs))):
        findings.append(f"outputs are numbered {sorted(named)}, not 0 to {len(program.outputs) - 1}")
    return findings


def message_findings(program: Program) -> list[str]:
    findings: list[str] = []
    meshes = [stream.mesh for stream in program.streams]
    sends, recvs = message_ends(program)
    for s, stream in enumerate(program.streams):
        for at, op in enumerate(stream.instructions):
            if not isinstance(op, (Send, Recv)):
                continue
            where = functools.partial(_place, stream, at)
            if not 0 <= op.channel < len(program.channels):
                findings.append(f"{where()}: there is no channel {op.channel}")
                continue
            channel = program.channels[op.channel]
            end = channel.source if isinstance(op, Send) else channel.target
            if end != stream.mesh:
                findings.append(
                    f"{where()}: channel {op.channel} goes from {channel.source} to {channel.target}"
                )
            if not 0 <= op.sequence < len(channel.types):
                findings.append(f"{where()}: channel {op.channel} has {len(channel.types)} messages")
            elif 0 <= op.buffer < len(stream.buffers):
                here, there = stream.buffers[op.buffer].type, channel.types[op.sequence]
                if not here.holds_the_same_as(there) or (isinstance(op, Recv) and here != there):
                    findings.append(
                        f"{where()}: {_buffer(stream, op.buffer)} is {here}, the message is {there}"
                    )
            first = (sends if isinstance(op, Send) else recvs)[op.channel][op.sequence]
            if first != (s, at):
                findings.append(
                    f"{where()}: message {op.sequence} was used at {meshes[first[0]]}[{first[1]}]"
                )
    for number, channel in enumerate(program.channels):
        for (s, at), text in (
            *((node, "no receive takes") for k, node in sends[number].items() if k not in recvs[number]),
            *((node, "nothing sends") for k, node in recvs[number].items() if k not in sends[number]),
        ):
            findings.append(f"{_place(program.streams[s], at)}: {text} this message")
        if {channel.source, channel.target} - set(meshes) or channel.source == channel.target:
            findings.append(f"channel {number} goes from {channel.source} to {channel.target}")
    return findings


def signature_findings(program: Program) -> list[str]:
    """Every call of one executable on one mesh has the same argument and result types and donations."""
    findings: list[str] = []
    seen: dict[tuple[str, str], tuple[_Signature, int]] = {}
    for stream in program.streams:
        for at, op in enumerate(stream.instructions):
            if not isinstance(op, Run) or any(
                not 0 <= b < len(stream.buffers) for b in (*op.inputs, *op.outputs)
            ):
                continue
            inputs = tuple(stream.buffers[b].type for b in op.inputs)
            outputs = tuple(stream.buffers[b].type for b in op.outputs)
            signature = (inputs, outputs, tuple(sorted(op.donated)))
            known, first = seen.setdefault((stream.mesh, op.executable), (signature, at))
            if known != signature:
                findings.append(
                    f"{_place(stream, at)}: called as {_signature_text(signature)}, but as "
                    f"{_signature_text(known)} at {_place(stream, first)}"
                )
    return findings


_Signature = tuple[tuple[BufferType, ...], tuple[BufferType, ...], tuple[int, ...]]


def _signature_text(signature: _Signature) -> str:
    inputs, outputs, donated = signature
    return f"({', '.join(map(str, inputs))}) -> ({', '.join(map(str, outputs))}) donating {list(donated)}"


def _deadlock_findings(
    program: Program, nodes: list[Node], blocked: dict[int, int], before: dict[Node, list[Node]]
) -> list[str]:
    if not blocked:
        return []
    done = set(nodes)
    findings = []
    for s, at in blocked.items():
        missing = [n for n in before.get((s, at), ()) if n not in done]
        waits = " and ".join(_place(program.streams[n[0]], n[1]) for n in missing)
        findings.append(f"{_place(program.streams[s], at)}: deadlock, waits for {waits}")
    return findings
