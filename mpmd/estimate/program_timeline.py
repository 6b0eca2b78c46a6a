"""Timelines of a step: predicted from what its fragments cost, measured as it runs."""

from __future__ import annotations

import dataclasses
import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from mpmd.compile.backends.targets import STAMPS
from mpmd.errors import CompileError, ConfigError
from mpmd.estimate.shared_cores import shared_intervals
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.channels.stamps import Stamps
from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.measure.step_trace import MeasuredSpan, StepRecorder, TraceRecorder, spans_of, stamped_types
from mpmd.runtime.measure.watchers import WatchingRecorder
from mpmd.runtime.processes.part import Part
from mpmd.runtime.program.order import Node, messages
from mpmd.runtime.program.stream_memory import buffer_categories
from mpmd.runtime.program.streams import (
    Copy,
    Program,
    Recv,
    Run,
    Send,
    Stream,
    between_memories,
    donated_buffers,
    ended_buffers,
    reads,
    writes,
)
from mpmd.runtime.program.verify_streams import verify
from mpmd.runtime.run.executor import Executor
from mpmd.scheduling.table import Phase, Task
from mpmd.scheduling.timeline import COMPUTE, IDLE, TRANSFER, MemoryCurve, Span, Timeline

Interval = tuple[float, float]
_BUFFERS = ("argument", "received", "activation", "gradient", "gathered", "result", "copy", "other")
_CATEGORIES = (*_BUFFERS, "kept", "workspace")

WAITS_FOR_HOST = "the host to enqueue it"
"""Ends the note of the idle time of a mesh between when a run could begin and when it did."""


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Bytes of temporaries of fragments, where known.

    Attributes:
        workspace: taken while a fragment runs, by (mesh, fragment).
        owned: held from call to call, by mesh and by owner: fragments with the same owner share it.
    """

    workspace: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    owned: Mapping[str, Mapping[Any, int]] = dataclasses.field(default_factory=dict)

    @property
    def kept(self) -> dict[str, int]:
        """Bytes held throughout the step, by mesh."""
        return {mesh: sum(of.values()) for mesh, of in self.owned.items()}

    @staticmethod
    def of(executables: Mapping[str, Any], meshes: Mapping[str, Any]) -> Scratch:
        """The scratch memory of fragments by name, over the devices of their meshes."""
        workspace, owned = dict[tuple[str, str], int](), dict[str, dict[Any, int]]()
        for name, executable in executables.items():
            mesh = executable.fragment.mesh
            workspace[mesh, name] = getattr(executable, "workspace_bytes", 0) * meshes[mesh].size
            owned.setdefault(mesh, {}).update(getattr(executable, "kept_memory", {}))
        return Scratch(workspace, owned)


@dataclasses.dataclass
class _Times:
    """When a step's runs and messages began and ended.

    A message is known by its receive; a copy between memories is a message, too.
    """

    runs: dict[Node, Interval] = dataclasses.field(default_factory=dict)
    messages: dict[Node, Interval] = dataclasses.field(default_factory=dict)


def predicted_timeline(
    program: Program,
    costs: ProgramCosts | Mapping[str, float] | None,
    meshes: Sequence[str],
    scratch: Scratch | None = None,
    cores: int | None = None,
) -> Timeline:
    """When everything would run if each mesh ran its stream in order.

    Args:
        program: the streams.
        costs: what fragments and messages take, or seconds of fragments by name; fragments that are not named
            take 1 second, and messages nothing.  Without any the timeline is in steps of one fragment.
        meshes: the order in which to show them.
        scratch: bytes of temporaries of fragments.
        cores: how many meshes compute at a time without slowing each other down; by default all.

    Raises:
        ConfigError: `costs` is something else.
    """
    in_steps, costs = not costs, _known(costs)
    order = verify(program)
    title = f"{program.name}, {'in steps of one fragment' if in_steps else 'predicted'}"
    if cores is not None:
        shared = _Times(*shared_intervals(program, costs, cores))
        return _timeline(program, shared, meshes, title, scratch or Scratch())
    sends = _sends(program)
    times = _Times()
    ready: dict[tuple[int, int], float] = {}
    device, host = [0.0] * len(program.streams), 0.0
    links: dict[tuple[int, str | None], float] = {}  # (stream, memory) -> end of the last copy to it
    posted: dict[tuple[int, int], Node] = {}  # received buffers whose arrival is not known yet

    def receive(s: int, at: int) -> None:
        sender, position = sends[s, at]
        op, sent = program.streams[s].instructions[at], program.streams[sender].instructions[position]
        assert isinstance(op, Recv) and isinstance(sent, Send)
        kinds = program.streams[sender].buffers[sent.buffer].type, program.streams[s].buffers[op.buffer].type
        start = ready.get((sender, sent.buffer), 0.0)
        end = ready[s, op.buffer] = start + costs.message_s(kinds)
        times.messages[s, at] = (start, end)

    def copy(s: int, at: int, op: Copy) -> None:
        kinds = between_memories(op, program.streams[s])
        start = end = ready.get((s, op.source), 0.0)
        if kinds is not None:  # issued behind the last run, whose memory it may use; in order with others
            link = s, kinds[1].memory_kind
            start = max(start, device[s], links.get(link, 0.0))
            end = links[link] = start + costs.message_s(kinds)
            times.messages[s, at] = (start, end)
        ready[s, op.buffer] = end

    for s, at in order.nodes:
        op = program.streams[s].instructions[at]
        for b in reads(op):
            if (s, b) in posted:
                receive(*posted.pop((s, b)))
        if isinstance(op, Run):
            host += costs.call_s
            start = max([device[s], host, *(ready.get((s, b), 0.0) for b in op.inputs)])
            end = device[s] = start + costs.run_s(op.executable)
            ready.update({(s, b): end for b in op.outputs})
            times.runs[s, at] = (start, end)
        elif isinstance(op, Recv):
            posted[s, op.buffer] = s, at
        elif isinstance(op, Copy):
            copy(s, at, op)
    timeline = _timeline(program, times, meshes, title, scratch or Scratch())
    return dataclasses.replace(timeline, in_steps=in_steps)


def _known(costs: Any) -> ProgramCosts:
    """The user's costs, completed.

    Raises:
        ConfigError: that is something else, or not seconds.
    """
    if isinstance(costs, ProgramCosts):
        return costs
    seconds = costs or {}
    if not isinstance(seconds, Mapping) or not all(isinstance(s, (int, float)) for s in seconds.values()):
        got = f"costs is {reprlib.repr(costs)}; it must be seconds by fragment, such as {{'f.step': 0.01}}"
        pair = isinstance(costs, tuple) and any(isinstance(part, ProgramCosts) for part in costs)
        raise ConfigError(got + "\n  measure.costs returns the results and the costs" * pair)
    return ProgramCosts(seconds)


def measured_timeline(
    executor: Executor | Part,
    devices: MeshDevices,
    leaves: Sequence[Any],
    meshes: Sequence[str],
    scratch: Scratch,
) -> tuple[list[Any], Timeline]:
    """Runs one step with a recorder; its flat results and its spans.

    The previous step is waited for: its tail would be charged to this one.  In several processes, which must
    all call it, the spans are those of all, by the clock of process 0.

    Raises:
        FragmentError: a fragment failed.
        PeerError: another process failed.
    """
    wait_for(leaves)
    recorder = recorder_of(executor, devices)
    with recorder:
        results = executor.run(leaves, observers=[recorder])
    executor.synchronize()
    warn_of_unseen(recorder)
    program, note = executor.program, recorder.note
    if not isinstance(executor, Part):
        return results, timeline_of(program, recorder.spans, meshes, scratch, note)
    times, error = executor.gathered_times("timeline", recorder.times)
    note += f", clocks of {jax.process_count()} processes aligned within {error * 1e3:.2f} ms"
    return results, timeline_of(program, spans_of(program, times), meshes, scratch, note)


def wait_for(leaves: Sequence[Any]) -> None:
    """Waits for the arrays that are in this process."""
    jax.block_until_ready([leaf for leaf in leaves if getattr(leaf, "is_fully_addressable", True)])


def recorder_of(executor: Executor | Part, devices: MeshDevices, one_by_one: bool = False) -> StepRecorder:
    """An observer of a step of a program on its devices; compiled, so that it takes no time later.

    With `one_by_one` another observer waits for each call before the next instruction.  Devices without
    stamps are watched, which the note of the recorder says.
    """
    program = executor.own_program
    platforms = {device.platform for mesh in devices.meshes.values() for device in mesh.devices.flat}
    source = STAMPS.get(platforms.pop()) if len(platforms) == 1 else None
    why = ""
    if source is not None:
        try:
            stamps = Stamps(source(), devices)
            stamps.prepare(stamped_types(program, executor.executables, stamps.ordered_apart))
            return TraceRecorder(program, executor.executables, stamps, one_by_one)
        except CompileError as error:
            why = str(error).splitlines()[0]
    devices.prepare_tokens(program)
    return WatchingRecorder(program, devices.token, why)


def warn_of_unseen(recorder: StepRecorder) -> None:
    """Warns of fragments whose times are unknown."""
    if recorder.unseen:
        warnings.warn(
            f"the timeline does not show {', '.join(recorder.unseen)}: another step with the same fragments "
            "ran at the same time\n  measure while nothing else runs",
            UserWarning,
            stacklevel=2,
        )


def timeline_of(
    program: Program,
    measured: Sequence[MeasuredSpan],
    meshes: Sequence[str],
    scratch: Scratch,
    note: str = "",
) -> Timeline:
    """The measured spans of one step as a timeline that begins at 0; `note` ends its title."""
    begin = min((span.start_s for span in measured), default=0.0)
    number = {stream.mesh: s for s, stream in enumerate(program.streams)}
    times = _Times()
    for span in measured:
        table = times.runs if span.kind == "run" else times.messages
        table[number[span.mesh], span.at] = (span.start_s - begin, span.end_s - begin)
    return _timeline(program, times, meshes, f"{program.name}, measured{note}", scratch)


def _timeline(
    program: Program, times: _Times, meshes: Sequence[str], title: str, scratch: Scratch
) -> Timeline:
    used = {stream.mesh for stream in program.streams}
    sources = _Sources.of(program)
    last = max((end for _, end in times.runs.values()), default=0.0)
    spans = [
        span for s in range(len(program.streams)) for span in _mesh_spans(program, s, times, sources, last)
    ]
    runs: list[dict[int, Interval]] = [{} for _ in program.streams]
    for (s, at), interval in times.runs.items():
        runs[s][at] = interval
    memory = [_memory(stream, runs[s], s, times, scratch) for s, stream in enumerate(program.streams)]
    return Timeline(tuple(spans), tuple(mesh for mesh in meshes if mesh in used), title, tuple(memory))


@dataclasses.dataclass(frozen=True)
class _Sources:
    """Where messages come from: the send of every receive, and the runs that produce buffers."""

    sends: Mapping[Node, Node]
    makers: Mapping[tuple[int, int], Run]

    @staticmethod
    def of(program: Program) -> _Sources:
        makers: dict[tuple[int, int], Run] = {}
        for s, stream in enumerate(program.streams):
            for op in stream.instructions:
                if isinstance(op, Run):
                    makers.update({(s, buffer): op for buffer in op.outputs})
                elif isinstance(op, Copy) and (s, op.source) in makers:
                    makers[s, op.buffer] = makers[s, op.source]
        return _Sources(_sends(program), makers)

    def maker(self, program: Program, send: Node) -> tuple[int, Run | None]:
        """The stream of a send, and the run that produced its value."""
        s, at = send
        op = program.streams[s].instructions[at]
        assert isinstance(op, Send)
        return s, self.makers.get((s, op.buffer))


def _mesh_spans(program: Program, s: int, times: _Times, sources: _Sources, last: float) -> list[Span]:
    """The runs and receives of a mesh, and why it was idle in between; `last` is the end of the step."""
    stream = program.streams[s]
    sends = sources.sends
    maker_of = {b: at for at, op in enumerate(stream.instructions) for b in writes(op)}
    spans: list[Span] = []
    clock = 0.0
    for at, op in enumerate(stream.instructions):
        if isinstance(op, Recv) and (s, at) in times.messages:
            start, end = times.messages[s, at]
            sender, maker = sources.maker(program, sends[s, at])
            size = stream.buffers[op.buffer].type.bytes
            name = f"{_label(maker) if maker else 'value'} to {stream.mesh}"
            task = _task(maker) if maker else None
            spans.append(
                Span(program.streams[sender].mesh, name, task, start, end, TRANSFER, stream.mesh, size)
            )
        elif isinstance(op, Copy) and (s, at) in times.messages:
            spans.append(_copy_span(stream, op, times.messages[s, at], sources.makers.get((s, op.source))))
        elif isinstance(op, Run) and (s, at) in times.runs:
            start, end = times.runs[s, at]
            received = [maker_of[b] for b in op.inputs if isinstance(stream.instructions[maker_of[b]], Recv)]
            arrivals = {(s, k): sends[s, k] for k in received if (s, k) in times.messages}
            makers = [(s, maker_of[b]) for b in op.inputs]
            back = max(
                (times.messages[m][1] for m in makers if m in times.messages.keys() - arrivals), default=0.0
            )
            for begin, stop, what, peer in _waits(program, sources, arrivals, times, clock, start, back):
                note = f"{_label(op)} waits for {what}"
                spans.append(Span(stream.mesh, "idle", None, begin, stop, IDLE, peer, note=note))
            spans.append(Span(stream.mesh, op.executable, _task(op), start, end, COMPUTE))
            clock = end
    if last > clock:
        note = "has done its part of the step"
        spans.append(Span(stream.mesh, "idle", None, clock, last, IDLE, note=note))
    return spans


def _copy_span(stream: Stream, op: Copy, when: Interval, maker: Run | None) -> Span:
    """A copy between memories: host memory is called as in an assignment, such as `m0#pinned_host`."""
    kinds = stream.buffers[op.source].type, stream.buffers[op.buffer].type
    source, target = (
        f"{stream.mesh}#{kind.memory_kind}" if kind.memory_kind else stream.mesh for kind in kinds
    )
    label, task = (_label(maker), _task(maker)) if maker else ("value", None)
    return Span(source, f"{label} to {target}", task, *when, TRANSFER, target, kinds[1].bytes)


def _waits(
    program: Program,
    sources: _Sources,
    arrivals: Mapping[Node, Node],
    times: _Times,
    free: float,
    start: float,
    back: float,
) -> Iterator[tuple[float, float, str, str]]:
    """The waits of a run that begins at `start` on a mesh that is free since `free`, one after the other.

    They are: until the value of its last message is produced, for the message, until `back` for copies from
    host memory, and for the host.  Each has begin, end, description, and for a message under way
    the mesh that it comes from.  `arrivals` are the receives of the run's inputs, each with its send.
    """
    clock = free
    last = max(arrivals, key=lambda recv: (times.messages[recv][1], recv), default=None)
    if last is not None:
        sender, maker = sources.maker(program, arrivals[last])
        label, mesh = _label(maker) if maker else "a value", program.streams[sender].mesh
        waits = ((f"{label} on {mesh}", ""), (f"the transfer of {label} from {mesh}", mesh))
        for end, (what, peer) in zip(times.messages[last], waits, strict=True):
            if clock < min(end, start):
                yield clock, min(end, start), what, peer
                clock = min(end, start)
    if clock < min(back, start):
        yield clock, min(back, start), "a copy from host memory", ""
        clock = min(back, start)
    if clock < start:
        yield clock, start, WAITS_FOR_HOST, ""


def _sends(program: Program) -> dict[Node, Node]:
    return {message.recv: message.send for channel in messages(program) for message in channel}


def _memory(
    stream: Stream, runs: Mapping[int, Interval], s: int, times: _Times, scratch: Scratch
) -> MemoryCurve:
    """Bytes of a mesh over time, counted as `predict_memory` counts them: instruction by instruction."""
    size = [buffer.type.device_bytes for buffer in stream.buffers]
    category = [_CATEGORIES.index(name) for name in buffer_categories(stream)]
    held = [0] * len(_CATEGORIES)
    held[-2] = scratch.kept.get(stream.mesh, 0)
    trained = {op.stage for op in stream.instructions if isinstance(op, Run) and op.phase in ("B", "W")}
    forwards = most = 0
    samples: list[tuple[float, tuple[int, ...]]] = []
    clock = 0.0

    def change(buffers: Sequence[int], sign: int) -> None:
        for b in buffers:
            held[category[b]] += sign * size[b]

    for at, op in enumerate(stream.instructions):
        if isinstance(op, Run) and at in runs:
            start, end = max(clock, runs[at][0]), max(clock, runs[at][1])
            held[-1] = scratch.workspace.get((stream.mesh, op.executable), 0)
            change(op.outputs, 1)
            change(donated_buffers(op), -1)
            samples.append((start, tuple(held)))
            held[-1], clock = 0, end
            samples.append((end, tuple(held)))
            forwards += (op.phase == "F" and op.stage in trained) - (op.phase in ("B", "W") and forwards > 0)
            most = max(most, forwards)
            continue
        clock = max(clock, times.messages.get((s, at), (0.0, 0.0))[0]) if isinstance(op, Recv) else clock
        change(writes(op), 1)
        samples.append((clock, tuple(held)))
        change(ended_buffers(op), -1)
        samples.append((clock, tuple(held)))
    changes = [sample for k, sample in enumerate(samples) if not k or sample[1] != samples[k - 1][1]]
    return MemoryCurve(stream.mesh, _CATEGORIES, tuple(changes), most)


def _label(op: Run) -> str:
    task = _task(op)
    return op.executable if task is None else str(task)


def _task(op: Run) -> Task | None:
    if op.microbatch is None or not op.phase:
        return None
    return Task(op.stage or 0, op.microbatch, Phase(op.phase))
