"""Timelines as one HTML file that needs nothing else: predicted above measured, details on hovering."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources

from mpmd.scheduling.render import (
    COLOURS,
    IDLE_COLOUR,
    INK,
    TRANSFER_COLOUR,
    UPPER_PART,
    bytes_text,
    duration,
    fills_of,
    has_several_stages,
    meaning_of,
    phase_of,
    phases_of,
    unit_of,
)
from mpmd.scheduling.render_svg import describe, labels_of
from mpmd.scheduling.table import Task
from mpmd.scheduling.timeline import COMPUTE, IDLE, TRANSFER, MemoryCurve, Span, Timeline

MEMORY_COLOURS = {
    "parameters": "#4550a8", "argument": "#4550a8", "gradients": "#7a1f5c", "gradient": "#7a1f5c",
    "activations": "#c2577f", "activation": "#c2577f", "residuals": "#7c4dc4", "received": "#8794e0",
    "batch": "#8794e0", "gathered": "#8a5a34", "result": "#6b8e23", "copy": "#5c6b2e", "other": "#806c5a",
    "kept": "#2f6b76", "workspace": "#b06a5a",
}  # fmt: skip
"""Of what holds bytes; none is the colour of a phase."""
_MORE_COLOURS = ("#3d3d8f", "#99406b", "#6b6b2a", "#5a3a6b")


def render_html(predicted: Timeline, measured: Timeline | None = None, title: str = "") -> str:
    """A page with lanes for each mesh, transfers, bytes over time and the critical path, on one axis of time.

    Hovering over a task shows stage, microbatch, time, bytes, the line of the model that it comes from, and
    the ratio to the same task of the other timeline, if it has it; over a gap, the reason of the wait; over
    memory, its holders.  Ctrl and the wheel zoom.

    Args:
        predicted: the timeline, predicted or not.
        measured: of the same meshes; drawn below the first, which is then called predicted, on the same time
            scale.
        title: of the page.

    Returns:
        The HTML; no scripts, fonts or styles are loaded from elsewhere.
    """
    timelines = {"predicted": predicted, "measured": measured} if measured is not None else {"": predicted}
    shown = {name: timeline for name, timeline in timelines.items() if timeline is not None}
    span_s = max((timeline.makespan_s for timeline in shown.values()), default=0.0) or 1.0
    title = title or (predicted.title.removesuffix(", predicted") if measured else predicted.title)
    title = title or "Timeline"
    meshes = list(dict.fromkeys(mesh for timeline in shown.values() for mesh in timeline.meshes))
    has_memory = any(memory.peak_bytes for timeline in shown.values() for memory in timeline.memory)
    body = [f"<h1>{escape(title)}</h1>", _summary(shown, has_memory), _TOOLS, _legend(shown.values())]
    longest = max(shown.values(), key=lambda timeline: timeline.makespan_s)
    unit, name = unit_of(longest)
    body.append(
        f'<div id="scroll" tabindex="0"><div id="wide" data-span="{span_s / unit:.9g}" data-unit="{name}">'
        '<div class="lane axis"><b></b><div id="ticks"></div></div>'
    )
    for mesh in meshes:
        body.append(f"<section><h2>{escape(mesh)}</h2>")
        most = max((_memory(timeline, mesh).peak_bytes for timeline in shown.values()), default=0)
        for number, (label, timeline) in enumerate(shown.items()):
            other = list(shown.values())[1 - number] if len(shown) > 1 else None
            body += _lanes(timeline, mesh, label, span_s, other)
            if most:
                body.append(_memory_plot(_memory(timeline, mesh), timeline, label, span_s, most))
        body.append("</section>")
    body.append("</div></div>")
    parts = {
        "title": escape(title),
        "style": _colours(shown.values()) + _part("timeline_page.css"),
        "body": "\n".join(body),
        "script": _part("timeline_page.js"),
    }
    return _PAGE.format(**parts)


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _memory(timeline: Timeline, mesh: str) -> MemoryCurve:
    empty = MemoryCurve(mesh, (), ())
    return next((memory for memory in timeline.memory if memory.mesh == mesh), empty)


def _summary(timelines: Mapping[str, Timeline], has_memory: bool) -> str:
    rows = "".join(
        f"<tr><th>{escape(label)}</th><td>{duration(timeline, timeline.makespan_s)}</td>"
        f"<td>{timeline.bubble_fraction():.1%}</td>"
        + (f"<td>{_most_bytes(timeline)}</td>" if has_memory else "")
        + "</tr>"
        for label, timeline in timelines.items()
    )
    heads = ["", "step", "idle", *(["most bytes on a mesh, counted"] if has_memory else [])]
    head = "".join(f"<th>{head}</th>" for head in heads)
    paths = "".join(
        f'<p class="path-text">{"critical path, " + label if label else "critical path"}: {escape(parts)}</p>'
        for label, timeline in timelines.items()
        if (parts := _path_parts(timeline))
    )
    return f"<table><tr>{head}</tr>{rows}</table>{paths}"


def _most_bytes(timeline: Timeline) -> str:
    most = max((memory.peak_bytes for memory in timeline.memory), default=0)
    return bytes_text(most) if most else "not known"


def _path_parts(timeline: Timeline) -> str:
    """The parts of the step in which its critical path computes and sends; empty if it has none."""
    if not timeline.critical_path or not timeline.makespan_s:
        return ""
    meshes: dict[str, float] = {}
    sent, clock = 0.0, timeline.begin_s
    for span in timeline.critical_path:
        seconds = max(0.0, span.end_s - max(clock, span.start_s))
        clock = max(clock, span.end_s)
        if span.kind == TRANSFER:
            sent += seconds
        else:
            meshes[span.mesh] = meshes.get(span.mesh, 0.0) + seconds
    computed = sum(meshes.values())
    each = sorted(meshes.items(), key=lambda part: -part[1])
    where = ", ".join(f"{mesh} {seconds / timeline.makespan_s:.0%}" for mesh, seconds in each[:4])
    if len(each) > 4:
        where += f", {len(each) - 4} more meshes"
    parts = {f"computing ({where})": computed, "transfers": sent}
    parts["between them"] = timeline.makespan_s - computed - sent
    return ", ".join(
        f"{seconds / timeline.makespan_s:.0%} {what}"
        for what, seconds in parts.items()
        if seconds > 5e-3 * timeline.makespan_s
    )


_TOOLS = (
    '<p class="tools">'
    '<label>zoom <input type="range" id="zoom" min="0" max="6" value="0" step="0.05"></label> '
    '<span id="factor"></span> '
    '<label><input type="checkbox" id="transfers" checked> transfers</label> '
    '<label><input type="checkbox" id="memory" checked> memory</label> '
    '<label><input type="checkbox" id="path" checked> critical path</label></p>'
)


def _legend(timelines: Iterable[Timeline]) -> str:
    lines = list(timelines)
    entries = [(_fill(fills_of(phase)), meaning_of(phase)) for phase in phases_of(*lines)]
    entries += [(TRANSFER_COLOUR, "transfer"), ("var(--stripes)", "idle")]
    if any(line.critical_path for line in lines):
        entries.append(("linear-gradient(var(--lane) 70%,var(--path) 70%)", "on the critical path"))
    held = [
        name
        for name in dict.fromkeys(
            name for line in lines for curve in line.memory for name in curve.categories
        )
        if any(curve.peak_by_category.get(name) for line in lines for curve in line.memory)
    ]
    colours = memory_colours(held)
    bytes_ = [(colours[name], name) for name in held]
    text = f'<p class="legend">{_entries(entries)}</p>'
    return text + (f'<p class="legend memory">bytes of {_entries(bytes_)}</p>' if bytes_ else "")


def _entries(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<span><u style="background:{fill}"></u>{meaning}</span>' for fill, meaning in entries)


def _fill(fills: Sequence[str]) -> str:
    edge = f"{UPPER_PART:.0%}"
    return fills[0] if len(fills) == 1 else f"linear-gradient({fills[0]} {edge},{fills[1]} {edge})"


def memory_colours(names: Iterable[str]) -> dict[str, str]:
    """Colours of what holds bytes, of other names too."""
    unknown = [name for name in names if name not in MEMORY_COLOURS]
    more = {name: _MORE_COLOURS[k % len(_MORE_COLOURS)] for k, name in enumerate(unknown)}
    return {**MEMORY_COLOURS, **more}


def _lanes(timeline: Timeline, mesh: str, label: str, span_s: float, other: Timeline | None) -> Iterator[str]:
    if mesh not in timeline.meshes:
        return
    counterpart, path = _by_task(other), {id(span) for span in timeline.critical_path}
    several = has_several_stages(timeline, mesh)

    def box(span: Span) -> str:
        labels = labels_of(span, several) if span.kind == COMPUTE else ()
        return _box(span, labels, span_s, timeline, counterpart, id(span) in path)

    busy = f"{timeline.bubble_fraction(mesh):.1%} idle"
    spans = (*timeline.idle(mesh), *timeline.compute(mesh))
    yield _lane(f"{label}, {busy}" if label else busy, "compute", map(box, spans))
    sent = [span for span in timeline.transfers if span.mesh.partition("#")[0] == mesh]  # or its host memory
    for source, peer in dict.fromkeys((span.mesh, span.peer) for span in sent):
        way = f"to {peer}" if source == mesh else f"from {source}"
        yield _lane(way, "transfer", (box(s) for s in sent if (s.mesh, s.peer) == (source, peer)))


def _lane(label: str, kind: str, boxes: Iterable[str]) -> str:
    return f'<div class="lane {kind}"><b>{escape(label)}</b><div>{"".join(boxes)}</div></div>'


def _by_task(timeline: Timeline | None) -> Mapping[tuple[str, Task], Span]:
    if timeline is None:
        return {}
    return {(s.mesh, s.task): s for s in timeline.spans if s.kind == COMPUTE and s.task is not None}


def _box(
    span: Span,
    labels: Sequence[str],
    span_s: float,
    timeline: Timeline,
    counterpart: Mapping[tuple[str, Task], Span],
    is_critical: bool,
) -> str:
    kind = {IDLE: "idle", TRANSFER: "send"}.get(span.kind, phase_of(span) or "x")
    lines = [describe(timeline, span)]
    twin = counterpart.get((span.mesh, span.task)) if span.kind == COMPUTE and span.task is not None else None
    if twin is not None and twin.seconds > 0:
        lines.append(
            f"in the other timeline {duration(timeline, twin.seconds)} "
            f"({span.seconds / twin.seconds:.2f} times)"
        )
    held = _memory(timeline, span.mesh).at(span.start_s) if span.kind == COMPUTE else 0
    if held:
        lines.append(f"{bytes_text(held)} held on {span.mesh}")
    if is_critical:
        lines.append("on the critical path")
    left, wide = 100 * (span.start_s - timeline.begin_s) / span_s, 100 * span.seconds / span_s
    names = f' data-labels="{escape("|".join(labels))}"' if labels else ""
    return (
        f'<i class="{kind}{" critical" * is_critical}" style="left:{left:.7g}%;width:{wide:.7g}%" '
        f'data-tip="{escape(chr(10).join(lines))}"{names}></i>'
    )


_PLOT_WIDTH, _PLOT_HEIGHT = 1_000_000, 60


def _memory_plot(memory: MemoryCurve, timeline: Timeline, label: str, span_s: float, most: int) -> str:
    """Stacked steps, a colour for each category, on the axis of the lanes.

    Args:
        memory: of a mesh.
        timeline: of the curve.
        label: of the timeline.
        span_s: the length of the axis.
        most: the bytes of its whole height.
    """
    unit, _ = unit_of(timeline)
    scale_x, scale_y = _PLOT_WIDTH / span_s, _PLOT_HEIGHT / most
    begin, end_s = timeline.begin_s, timeline.begin_s + timeline.makespan_s
    ends = [seconds for seconds, _ in memory.samples[1:]] + [end_s]
    areas = []
    colours = memory_colours(memory.categories)
    for k, category in enumerate(memory.categories):
        if not memory.peak_by_category[category]:
            continue
        upper: list[str] = []
        lower: list[str] = []
        for (start, sizes), end in zip(memory.samples, ends, strict=True):
            low, high = sum(sizes[:k]), sum(sizes[: k + 1])
            x0, x1 = (f"{max(0.0, t - begin) * scale_x:.0f}" for t in (start, end))
            for points, size in ((upper, high), (lower, low)):
                y = f"{_PLOT_HEIGHT - size * scale_y:.1f}"
                points += [f"{x0},{y}", f"{x1},{y}"]
        areas.append(f'<polygon fill="{colours[category]}" points="{" ".join(upper + lower[::-1])}"/>')
    held = [(f"{(t - begin) / unit:.7g}", sizes) for t, sizes in memory.samples]
    data = {"names": memory.categories, "at": [float(t) for t, _ in held], "held": [s for _, s in held]}
    times = f" at the {label} times" if label else ""
    data["note"] = f"{memory.mesh}: sizes of the program's buffers{times}"
    peak = f"counted, peak {bytes_text(memory.peak_bytes)}"
    return (
        f'<div class="lane memory"><b>{escape(peak)}</b>'
        f'<div data-memory="{escape(json.dumps(data, separators=(",", ":")))}">'
        f'<svg viewBox="0 0 {_PLOT_WIDTH} {_PLOT_HEIGHT}" preserveAspectRatio="none">{"".join(areas)}</svg>'
        "</div></div>"
    )


def _colours(timelines: Iterable[Timeline]) -> str:
    phases = {*COLOURS, *phases_of(*timelines)}
    fills = "".join(f"i.{phase or 'x'}{{background:{_fill(fills_of(phase))}}}" for phase in sorted(phases))
    light, dark = f"--idle:{IDLE_COLOUR}", "--idle:#2a2f38"
    return (
        f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"i{{color:{INK}}}i.send{{background:{TRANSFER_COLOUR}}}{fills}\n"
    )


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
<div id="tip"></div>
<script>
{script}</script>
</body></html>
"""
