"""A step in a world that need not be here: its seconds and memory, and whether it fits.

The step is traced and partitioned for all processes, and every fragment is taken as far as possible without
its device: to planned kernels and assigned memory, or to code that is timed where the devices are this
machine's.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpmd.api.aot import Lowered
from mpmd.api.step_card import meshes_text
from mpmd.brief import BriefTable, as_html, bytes_text, card, counted, few, seconds_text
from mpmd.compile.backends.targets import DESCRIBED
from mpmd.compile.compiler import alike
from mpmd.config.described import DescribedWorld
from mpmd.cost.device import Device
from mpmd.estimate.estimate import host_copy_seconds
from mpmd.estimate.fragment_forecast import CollectiveForecast, FragmentForecast, forecast_fragment
from mpmd.estimate.program_timeline import Scratch, predicted_timeline
from mpmd.planning.forecast_page import forecast_page
from mpmd.planning.timed_fragments import timed_fragments
from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.program.order import messages
from mpmd.runtime.program.pairs import order_pairs
from mpmd.runtime.program.stream_memory import MeshMemory, predict_memory
from mpmd.runtime.program.streams import Recv, Run, Send
from mpmd.runtime.program.verify_streams import verify
from mpmd.runtime.run.clients import available_cores
from mpmd.scheduling.render_html import render_html
from mpmd.scheduling.render_svg import legible_width, render_svg
from mpmd.scheduling.timeline import Timeline
from mpmd.support.progress import ProgressLine

Traffic = tuple[str, str]
"""The source and the target of messages."""


@dataclasses.dataclass(frozen=True)
class StepForecast:
    """What one step would take in a described world.

    Attributes:
        lowered: the step.
        world: where.
        fragments: by name.
        programs: how many of the fragments are distinct.
        costs: of fragments and messages.
        timeline: of the step.
        memory: of each mesh over all its devices.
        pairs: how many messages are ordered between processes.
        took_s: seconds of the forecast, tracing included.
        nearest: if the step does not fit, what to change so that it would; "" if nothing tried does.
    """

    lowered: Lowered
    world: DescribedWorld
    fragments: Mapping[str, FragmentForecast]
    programs: int
    costs: ProgramCosts
    timeline: Timeline
    memory: Mapping[str, MeshMemory]
    pairs: int
    took_s: float = 0.0
    nearest: str = ""

    def __repr__(self) -> str:
        world, most = self.world, max(self.memory, key=self.peak_of)
        limit = f" of {bytes_text(world.memory_bytes)}" if world.memory_bytes else ""
        sent = self.messages.values()
        total = bytes_text(sum(size for _, size in sent))
        rows = [
            ("meshes", meshes_text(self.lowered.config.topology)),
            ("step", f"{seconds_text(self.step_s)}, bubble {self.timeline.bubble_fraction():.1%}"),
            ("fragments", f"{len(self.fragments)}, {self.programs} of them distinct"),
            ("messages", f"{sum(count for count, _ in sent):,} in a step, {total}"),
            ("memory", f"at most {bytes_text(self.peak_of(most))}{limit} on a device of {most}"),
            ("too large", few(self.too_large)),
            ("nearest fit", self.nearest.partition("\n")[0]),
        ]
        devices = f"{counted(world.processes, 'process')} x {world.devices} {world.device.name}"
        return card(f"StepForecast of {self.lowered.name!r} on {devices}", rows)

    def _repr_html_(self) -> str:
        """The page above its timeline, for notebooks."""
        return as_html(str(self), self.timeline._repr_svg_())

    @property
    def step_s(self) -> float:
        return self.timeline.makespan_s

    def peak_of(self, mesh: str) -> int:
        """Bytes of one device of a mesh at its peak."""
        return self.memory[mesh].peak_bytes // self.lowered.config.topology[mesh].size

    @property
    def too_large(self) -> list[str]:
        """The meshes whose devices have too little memory."""
        limit = self.world.memory_bytes
        return [mesh for mesh in self.memory if limit is not None and self.peak_of(mesh) > limit]

    @property
    def messages(self) -> dict[Traffic, tuple[int, int]]:
        """For each pair of meshes how many messages a step sends, and their bytes."""
        sent: dict[Traffic, list[int]] = collections.defaultdict(lambda: [0, 0])
        for stream in self.lowered.program.streams:
            for op in stream.instructions:
                if isinstance(op, Send):
                    target = self.lowered.program.channels[op.channel].types[op.sequence]
                    count = sent[stream.mesh, target.mesh]
                    count[0] += 1
                    count[1] += target.bytes
        return BriefTable({pair: (count, size) for pair, (count, size) in sent.items()})

    @property
    def collectives(self) -> dict[str, list[CollectiveForecast]]:
        """For each mesh its collectives in a step, those of one device."""
        calls = _calls(self.lowered)
        of_mesh = BriefTable[str, list[CollectiveForecast]]()
        for mesh, counts in calls.items():
            total: dict[tuple[str, bool], CollectiveForecast] = {}
            for name, times in counts.items():
                for c in self.fragments[name].collectives:
                    scaled = CollectiveForecast(
                        c.opcode, c.near, times * c.times, times * c.sent_bytes, times * c.seconds
                    )
                    total[c.opcode, c.near] = _joined(total.get((c.opcode, c.near)), scaled)
            of_mesh[mesh] = [total[key] for key in sorted(total)]
        return of_mesh

    def __str__(self) -> str:
        return forecast_page(self)

    def figures(self) -> dict[str, Any]:
        """The step in seconds, and of each mesh the bytes of one device at its peak, by what holds them."""
        topology = self.lowered.config.topology
        held = {
            name: {kind: size // topology[name].size for kind, size in m.by_category.items()}
            for name, m in self.memory.items()
        }
        return {
            "step_s": self.step_s,
            "peak_bytes": {name: self.peak_of(name) for name in self.memory},
            "held_bytes": held,
            "fits": not self.too_large,
        }

    def write(self, folder: Path) -> None:
        """Writes the page as text, its figures as JSON, and the timeline as HTML and SVG."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("forecast.txt", str(self)),
            ("forecast.json", json.dumps(self.figures(), indent=1) + "\n"),
            ("timeline.html", render_html(self.timeline)),
            ("timeline.svg", render_svg(self.timeline, width=legible_width(self.timeline))),
        ):
            (folder / name).write_text(text, encoding="utf-8")


def _joined(one: CollectiveForecast | None, other: CollectiveForecast) -> CollectiveForecast:
    if one is None:
        return other
    return dataclasses.replace(
        one,
        times=one.times + other.times,
        sent_bytes=one.sent_bytes + other.sent_bytes,
        seconds=one.seconds + other.seconds,
    )


def _calls(lowered: Lowered) -> dict[str, collections.Counter[str]]:
    """How often each mesh runs each of its fragments."""
    return {
        stream.mesh: collections.Counter(op.executable for op in stream.instructions if isinstance(op, Run))
        for stream in lowered.program.streams
    }


def forecast(lowered: Lowered, world: DescribedWorld) -> StepForecast:
    """What a step would take.

    Args:
        lowered: the step, on a topology of placeholders.
        world: where it would run.

    Raises:
        CompileError: a fragment cannot be compiled for the devices; names it.
        ProgramError: the order of messages does not come to an end.
    """
    topology, program = lowered.config.topology, lowered.program
    pairs = _ordered_pairs(lowered)
    processes = {name: [d.process_index for d in mesh.devices.flat] for name, mesh in topology.items()}
    target = DESCRIBED[world.target]()
    known: dict[str, FragmentForecast] = {}
    groups = alike(lowered.fragments, topology)
    with ProgressLine("dry run") as progress:
        if world.is_here:
            known.update(timed_fragments(lowered, world.processes, progress.show))
        for number, names in enumerate(groups):
            progress.show("fragments", number, len(groups))
            if names[0] in known:
                continue
            spread: dict[tuple[int, ...], FragmentForecast] = {}
            for name in names:
                fragment = lowered.fragments[name]
                of_mesh = processes[fragment.mesh]
                where = tuple(p - of_mesh[0] for p in of_mesh)
                if where not in spread:
                    axes = dict(topology[fragment.mesh].shape)
                    found = forecast_fragment(fragment, target, axes, of_mesh)
                    if world.is_here:
                        found = dataclasses.replace(found, reasons=(*found.reasons, _NOT_TIMED))
                    spread[where] = found
                known[name] = spread[where]
    seconds = {name: known[name].seconds for name in lowered.fragments}
    if world.is_here:
        seconds = _with_host_work(lowered, seconds)
    costs = ProgramCosts(seconds, _message_seconds(lowered, world.device))
    scratch = _scratch(lowered, known)
    cores = len(available_cores()) if world.is_here else None
    timeline = predicted_timeline(program, costs, list(topology), scratch, cores)
    timeline = dataclasses.replace(timeline, title=f"{lowered.name}, predicted")
    memory = {m.mesh: m for m in predict_memory(program, scratch.workspace, scratch.kept)}
    return StepForecast(lowered, world, known, len(groups), costs, timeline, memory, pairs)


_CALL_SECONDS = 4e-4
"""Time of a core for one call of a fragment, outside of compiled code: Python and XLA around it."""
_END_SECONDS = 2.5e-4
"""Time of a core for one end of a message: threads of the transfer server, sockets, waits.

Source: both are from a step of the example in four processes, docs/decisions/messages-between-processes.md.
"""


def _with_host_work(lowered: Lowered, seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of runs, with the work of the host that takes cores from them: calls, and ends of messages."""
    calls, several = _calls(lowered), bool(lowered.config.topology.processes)
    longer = dict(seconds)
    for stream in lowered.program.streams:
        counts = calls[stream.mesh]
        ends = sum(isinstance(op, Send | Recv) for op in stream.instructions) if several else 0
        for name in counts:
            longer[name] += _CALL_SECONDS + _END_SECONDS * ends / counts.total()
    return longer


_NOT_TIMED = "a mesh over several processes, or a callback: not timed, but priced for a core of a server"


def _ordered_pairs(lowered: Lowered) -> int:
    """Orders the messages between processes as GPUs would need it, checked; how many there are."""
    program, processes = lowered.program, lowered.config.topology.processes
    if not processes:
        return 0
    order = verify(program)
    between = {
        (number, sequence)
        for number, channel in enumerate(program.channels)
        if not set(processes[channel.source]) & set(processes[channel.target])
        for sequence in range(len(channel.types))
    }
    return len(order_pairs(program, order, between).pairs)


def _message_seconds(lowered: Lowered, device: Device) -> dict[Any, float]:
    """Seconds of each kind of message, and of copy to or from the host.

    Each device sends its part, to a device of another process or not.
    """
    topology, program = lowered.config.topology, lowered.program
    of: dict[str, set[int]] = {
        name: {d.process_index for d in mesh.devices.flat} for name, mesh in topology.items()
    }
    seconds = host_copy_seconds(program, topology, device)
    for channel in messages(program):
        for message in channel:
            stream = program.streams[message.send[0]]
            send = stream.instructions[message.send[1]]
            assert isinstance(send, Send)
            target = program.channels[send.channel].types[send.sequence]
            near = of[stream.mesh] == of[target.mesh] and len(of[target.mesh]) == 1
            size = target.bytes / topology[target.mesh].size
            kinds = stream.buffers[send.buffer].type, target
            seconds[kinds] = device.exchange_seconds(size, 1, 1, near=near)
    return seconds


def _scratch(lowered: Lowered, fragments: Mapping[str, FragmentForecast]) -> Scratch:
    topology = lowered.config.topology
    workspace, kept = {}, dict[str, dict[Any, int]]()
    for name, fragment in lowered.fragments.items():
        size = topology[fragment.mesh].size
        workspace[fragment.mesh, name] = fragments[name].temporary_bytes * size
        kept.setdefault(fragment.mesh, {})[fragment.fingerprint] = fragments[name].kept_bytes * size
    return Scratch(workspace, kept)
