"""The page of a dry run."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mpmd.brief import bytes_text, seconds_text
from mpmd.runtime.program.stream_memory import MeshMemory
from mpmd.scheduling.render import render_text

if TYPE_CHECKING:
    from mpmd.planning.step_forecast import StepForecast

_COLUMNS = (
    ("state", ("argument", "result")),
    ("activations", ("activation",)),
    ("gradients", ("gradient",)),
    ("gathered", ("gathered",)),
    ("messages", ("received", "copy")),
    ("temporaries", ("workspace", "kept")),
    ("other", ("other",)),
)
"""A column of the table of memory, and the categories of buffers in it."""


def forecast_page(forecast: StepForecast) -> str:
    """Everything that a dry run found, for a terminal of 150 columns."""
    parts = [_head(forecast), _time(forecast), _memory(forecast), _traffic(forecast), _picture(forecast)]
    return "\n\n".join(parts) + "\n"


def _head(forecast: StepForecast) -> str:
    world, lowered = forecast.world, forecast.lowered
    total = world.processes * world.devices
    meshes = collections.Counter(_axes(mesh.shape) for mesh in lowered.config.topology.values())
    streams = lowered.program.streams
    instructions = sum(len(stream.instructions) for stream in streams)
    lines = [
        f"dry run of {lowered.name}: {world.processes} processes x {world.devices} "
        f"{world.device.name}, {total} devices; {forecast.took_s:.0f} s",
        "meshes     " + ", ".join(f"{count} x ({axes})" for axes, count in meshes.items()),
        f"compiled   {len(forecast.fragments)} fragments, {forecast.programs} programs, {_how(forecast)}",
        f"verified   {len(streams)} streams of {instructions:,} instructions, "
        f"{forecast.pairs:,} messages between processes in one order",
    ]
    return "\n".join(lines)


def _axes(shape: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in shape.items())


def _how(forecast: StepForecast) -> str:
    """How fragments were compiled, and why some were not."""
    reasons = collections.Counter(
        reason for fragment in forecast.fragments.values() for reason in fragment.reasons
    )
    if not reasons:
        here = "compiled and timed here" if forecast.world.is_here else "with kernels planned for "
        return f"all {here}" + ("" if forecast.world.is_here else forecast.world.device.name)
    some = sum(bool(f.reasons) for f in forecast.fragments.values())
    (reason, _), *more = reasons.most_common()
    others = f" (and {len(more)} other reasons)" if more else ""
    return f"{some} of them by a model, in whole or in part: {reason}{others}"


def _time(forecast: StepForecast) -> str:
    timeline, meshes = forecast.timeline, len(forecast.timeline.meshes)
    step, whole = forecast.step_s, forecast.step_s * meshes
    collectives = sum(c.seconds for found in forecast.collectives.values() for c in found)
    busy = sum(timeline.busy_s(mesh) for mesh in timeline.meshes)
    waiting = sum(timeline.waiting_s(mesh) for mesh in timeline.meshes)
    shares = (
        ("kernels", busy - collectives),
        ("collectives", collectives),
        ("waiting for messages", waiting),
        ("bubble", whole - busy - waiting),
    )
    return f"step       {seconds_text(step)} predicted: " + ", ".join(
        f"{name} {seconds / whole:.1%}" for name, seconds in shares
    )


def _memory(forecast: StepForecast) -> str:
    limit = forecast.world.memory_bytes
    topology = forecast.lowered.config.topology
    rows = [("memory of a device", "processes", "peak", *(name for name, _ in _COLUMNS), "when")]
    for mesh in topology:
        if mesh not in forecast.memory:
            continue
        held, size = forecast.memory[mesh].by_category, topology[mesh].size
        columns = [
            bytes_text(sum(held.get(category, 0) for category in categories) // size)
            for _, categories in _COLUMNS
        ]
        of_mesh = topology.processes.get(mesh, (0,))
        where = str(of_mesh[0]) if len(of_mesh) == 1 else f"{of_mesh[0]}-{of_mesh[-1]}"
        full = " !" if mesh in forecast.too_large else ""
        rows.append(
            (mesh, where, bytes_text(forecast.peak_of(mesh)) + full, *columns, _when(forecast.memory[mesh]))
        )
    lines = _table(rows, left=(0, 10))
    on_host = {mesh: m.host_bytes // topology[mesh].size for mesh, m in forecast.memory.items()}
    most = max(on_host, key=lambda mesh: on_host[mesh])
    if on_host[most]:
        lines.append(f"host memory of a device: at most {bytes_text(on_host[most])}, {most}")
    if limit is None:
        return "\n".join(lines)
    over = forecast.too_large
    if not over:
        return "\n".join([*lines, f"it fits: a device has {bytes_text(limit)}"])
    lines.append(
        f"it does not fit: a device has {bytes_text(limit)}, too little for {_meshes(over, list(topology))}"
    )
    return "\n".join([*lines, *([forecast.nearest] if forecast.nearest else [])])


def _when(memory: MeshMemory) -> str:
    """The task or the program at the peak."""
    _, _, task = memory.instruction.partition("  # ")
    if task.startswith('"'):
        return task.strip('"').partition(" (")[0]
    return task.partition(' "')[0] or memory.instruction.partition(" = ")[2].partition("(")[0]


def _traffic(forecast: StepForecast) -> str:
    processes = forecast.lowered.config.topology.processes
    sent: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}
    busiest: collections.Counter[tuple[str, str]] = collections.Counter()
    for (source, target), (count, size) in forecast.messages.items():
        near = processes.get(source, ()) == processes.get(target, ())
        sent[near][0] += count
        sent[near][1] += size
        busiest[source, target] = size
    lines = []
    for near, where in ((False, "between processes"), (True, "within processes")):
        count, size = sent[near]
        if count:
            lines.append(f"messages {where}: {count:,}, {bytes_text(size)} a step")
    if busiest:
        (source, target), size = busiest.most_common(1)[0]
        lines[-1] += f"; most from {source} to {target}, {bytes_text(size)}"
    rows: list[tuple[str, ...]] = [("collectives of a device", "where", "times", "sent", "seconds", "on")]
    same: dict[tuple[str, ...], list[str]] = {}
    for mesh, found in forecast.collectives.items():
        for c in found:
            where = "within a process" if c.near else "between processes"
            row = (c.opcode, where, f"{c.times:,}", bytes_text(c.sent_bytes), seconds_text(c.seconds))
            same.setdefault(row, []).append(mesh)
    order = list(forecast.lowered.config.topology)
    rows += [(*row, _meshes(meshes, order)) for row, meshes in sorted(same.items())]
    return "\n".join(
        [*(lines or ["no messages"]), *(_table(rows, left=(0, 1, 5)) if same else ["no collectives"])]
    )


def _meshes(meshes: Sequence[str], order: Sequence[str]) -> str:
    """Names, in runs of the order of the topology: `m0, m2-m5`."""
    numbers = sorted(order.index(mesh) for mesh in meshes)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(order[r[0]] if len(r) == 1 else f"{order[r[0]]}-{order[r[-1]]}" for r in runs)


def _picture(forecast: StepForecast) -> str:
    return render_text(forecast.timeline).rstrip()


def _table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:{'<' if k in left else '>'}{width}}" for k, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
