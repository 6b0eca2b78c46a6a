"""Timelines as one HTML file that needs nothing else: predicted above measured, details on hovering."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from mpmd.scheduling.render import (
    COLOURS,
    IDLE_COLOUR,
    INK,
    MEANING,
    TRANSFER_COLOUR,
    duration,
    has_several_stages,
    label_of,
    phase_of,
    phases_of,
)
from mpmd.scheduling.render_svg import describe, ticks
from mpmd.scheduling.table import Task
from mpmd.scheduling.timeline import COMPUTE, IDLE, TRANSFER, MemoryCurve, Span, Timeline

_CATEGORY_COLOURS = ("#6f7f8f", "#009e73", "#e69f00", "#0072b2", "#cc79a7", "#d55e00", "#56b4e9", "#b3a125")


def render_html(predicted: Timeline, measured: Timeline | None = None, title: str = "") -> str:
    """A page with one pair of lanes per mesh, transfers, and bytes over time, all on one axis of time.

    Hovering over a task shows stage, microbatch, milliseconds, bytes, and the ratio to the same task of the
    other timeline, if it has it; over a gap, the reason of the wait.

    Args:
        predicted: by simulation.
        measured: of the same meshes; drawn below the prediction, on the same time scale.
        title: of the page.

    Returns:
        The HTML; no scripts, fonts or styles are loaded from elsewhere.
    """
    timelines = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    span_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0) or 1.0
    title = title or predicted.title or "Timeline"
    meshes = list(dict.fromkeys(mesh for timeline in timelines.values() for mesh in timeline.meshes))
    body = [f"<h1>{escape(title)}</h1>", _summary(timelines)]
    body.append(
        '<p class="tools">'
        '<label>zoom <input type="range" id="zoom" min="1" max="40" value="1" step="0.5"></label> '
        '<label><input type="checkbox" id="transfers" checked> transfers</label></p>'
    )
    body.append(_legend(timelines.values()))
    body.append('<div id="scroll"><div id="wide">')
    body.append(_axis(max(timelines.values(), key=lambda timeline: timeline.makespan_s), span_s))
    curves = {memory.mesh: memory for memory in predicted.memory if memory.peak_bytes}
    for mesh in meshes:
        body.append(f"<section><h2>{escape(mesh)}</h2>")
        for label, timeline in timelines.items():
            other = measured if label == "predicted" else predicted
            body += _lanes(timeline, mesh, label, span_s, other)
        if mesh in curves:
            body.append(_memory_plot(curves[mesh], predicted, span_s))
        body.append("</section>")
    body.append("</div></div>")
    return _PAGE.format(title=escape(title), style=_style(), body="\n".join(body), script=_SCRIPT)


def _summary(timelines: Mapping[str, Timeline]) -> str:
    rows = "".join(
        f"<tr><td>{escape(label)}</td><td>{duration(timeline, timeline.makespan_s)}</td>"
        f"<td>{timeline.bubble_fraction():.1%}</td><td>{_most_bytes(timeline)}</td></tr>"
        for label, timeline in timelines.items()
    )
    return (
        "<table><tr><th></th><th>step</th><th>idle</th><th>most bytes on a mesh</th></tr>" + rows + "</table>"
    )


def _most_bytes(timeline: Timeline) -> str:
    most = max((memory.peak_bytes for memory in timeline.memory), default=0)
    return f"{most:,}" if most else "not known"


def _legend(timelines: Iterable[Timeline]) -> str:
    entries = [(COLOURS[phase], MEANING[phase]) for phase in phases_of(*timelines)]
    entries += [(TRANSFER_COLOUR, "transfer"), (IDLE_COLOUR, "idle")]
    shown = "".join(
        f'<span><u style="background:{colour}"></u>{meaning}</span>' for colour, meaning in entries
    )
    return f'<p class="legend">{shown}</p>'


def _axis(timeline: Timeline, span_s: float) -> str:
    marks = (
        f'<span style="left:{100 * seconds / span_s:.4f}%">{escape(label)}</span>'
        for seconds, label in ticks(timeline)
    )
    return f'<div class="lane axis"><b></b><div>{"".join(marks)}</div></div>'


def _lanes(timeline: Timeline, mesh: str, label: str, span_s: float, other: Timeline | None) -> Iterable[str]:
    if mesh not in timeline.meshes:
        return
    counterpart = _by_task(other)
    busy = f"{timeline.bubble_fraction(mesh):.1%} idle"
    spans = (*timeline.idle(mesh), *timeline.compute(mesh))
    yield _lane(f"{label}, {busy}", "compute", [_box(s, span_s, timeline, counterpart) for s in spans])
    sent = [span for span in timeline.transfers if span.mesh.partition("#")[0] == mesh]  # or its host memory
    for source, peer in dict.fromkeys((span.mesh, span.peer) for span in sent):
        boxes = [_box(s, span_s, timeline, counterpart) for s in sent if (s.mesh, s.peer) == (source, peer)]
        way = f"to {peer}" if source == mesh else f"from {source}"
        yield _lane(f"{label}, {way}", "transfer", boxes)


def _lane(label: str, kind: str, boxes: Sequence[str]) -> str:
    return f'<div class="lane {kind}"><b>{escape(label)}</b><div>{"".join(boxes)}</div></div>'


def _by_task(timeline: Timeline | None) -> Mapping[tuple[str, Task], Span]:
    if timeline is None:
        return {}
    return {(s.mesh, s.task): s for s in timeline.spans if s.kind == COMPUTE and s.task is not None}


def _box(span: Span, span_s: float, timeline: Timeline, counterpart: Mapping[tuple[str, Task], Span]) -> str:
    style = {IDLE: "idle", TRANSFER: "send"}.get(span.kind, phase_of(span) or "x")
    lines = [describe(timeline, span)]
    twin = counterpart.get((span.mesh, span.task)) if span.kind == COMPUTE and span.task is not None else None
    if twin is not None and twin.seconds > 0:
        lines.append(
            f"in the other timeline {duration(timeline, twin.seconds)} "
            f"({span.seconds / twin.seconds:.2f} times)"
        )
    held = _held(timeline, span) if span.kind == COMPUTE else 0
    if held:
        lines.append(f"{held:,} bytes held on {span.mesh}")
    left, wide = 100 * (span.start_s - timeline.begin_s) / span_s, 100 * span.seconds / span_s
    several = span.kind == COMPUTE and has_several_stages(timeline, span.mesh)
    label = escape(label_of(span, several)) if span.kind == COMPUTE else ""
    return (
        f'<i class="{style}" style="left:{left:.4f}%;width:{wide:.4f}%" '
        f'data-tip="{escape(chr(10).join(lines))}">{label}</i>'
    )


def _held(timeline: Timeline, span: Span) -> int:
    """Bytes held on a span's mesh once it has started."""
    memory = next((m for m in timeline.memory if m.mesh == span.mesh), None)
    if memory is None or not memory.peak_bytes:
        return 0
    return memory.at(span.start_s)


def _memory_plot(memory: MemoryCurve, timeline: Timeline, span_s: float) -> str:
    """Stacked steps, one colour per category, on the axis of the lanes."""
    width, height, makespan_s = 1000, 70, timeline.makespan_s
    scale_x = width / span_s
    scale_y = height / memory.peak_bytes
    ends = [seconds for seconds, _ in memory.samples[1:]] + [makespan_s]
    areas, legend = [], []
    for k, category in enumerate(memory.categories):
        if not memory.peak_by_category[category]:
            continue
        upper, lower = [], []
        for (start, sizes), end in zip(memory.samples, ends, strict=True):
            low, high = sum(sizes[:k]), sum(sizes[: k + 1])
            x0, x1 = f"{start * scale_x:.1f}", f"{end * scale_x:.1f}"
            upper += [f"{x0},{height - high * scale_y:.1f}", f"{x1},{height - high * scale_y:.1f}"]
            lower += [f"{x0},{height - low * scale_y:.1f}", f"{x1},{height - low * scale_y:.1f}"]
        colour = _CATEGORY_COLOURS[k % len(_CATEGORY_COLOURS)]
        areas.append(f'<polygon fill="{colour}" points="{" ".join(upper + lower[::-1])}"/>')
        at_peak = memory.at_peak[category]
        legend.append(f'<span style="color:{colour}">&#9632;</span> {category} {at_peak:,}')
    return (
        '<div class="lane bytes"><b>bytes, predicted</b><div>'
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none">{"".join(areas)}</svg></div></div>'
        f'<p class="bytes">peak {memory.peak_bytes:,} bytes at '
        f"{duration(timeline, memory.peak_time_s)}: {' '.join(legend)}</p>"
    )


def _style() -> str:
    phases = "".join(f"i.{phase or 'x'}{{background:{colour}}}" for phase, colour in COLOURS.items())
    return f"{_CSS}i{{color:{INK}}}i.send{{background:{TRANSFER_COLOUR}}}{phases}"


_CSS = """
body{font:13px sans-serif;margin:16px;color:#222}h1{font-size:18px}h2{font-size:13px;margin:10px 0 3px}
table{border-collapse:collapse}td,th{padding:2px 12px 2px 0;text-align:left}
#scroll{overflow-x:auto;border-bottom:1px solid #ddd}#wide{width:100%;min-width:100%}
.lane{display:flex;height:22px;margin:1px 0}
.lane>b{position:sticky;left:0;flex:0 0 140px;font:11px/22px sans-serif;color:#555;background:#fff;z-index:2}
.lane>div{position:relative;flex:1;background:#f3f3f3}
.lane.transfer{height:10px}.lane.transfer>b{font:9px/10px sans-serif}.lane.transfer>div{background:#fafafa}
i{position:absolute;top:0;bottom:0;overflow:hidden;box-sizing:border-box;border-right:1px solid #fff;
font:10px/22px sans-serif;text-align:center}
i.idle{background:repeating-linear-gradient(45deg,#eee,#eee 4px,#f8f8f8 4px,#f8f8f8 8px)}
.no-transfers .transfer{display:none}
#tip{position:fixed;display:none;background:#222;color:#fff;padding:6px 9px;white-space:pre;z-index:9;
border-radius:3px;font-size:12px;pointer-events:none}
.lane.bytes{height:70px}.lane.bytes svg{display:block;width:100%;height:70px}
p.bytes{position:sticky;left:140px;margin:2px 0 2px 140px;display:inline-block;font-size:11px;color:#555}
.lane.axis{height:16px}.lane.axis>div{background:none;border-bottom:1px solid #bbb}
.axis span{position:absolute;font-size:10px;color:#555;border-left:1px solid #bbb;padding-left:3px}
.legend span{margin-right:16px}.legend u{display:inline-block;width:12px;height:12px;margin-right:5px;
vertical-align:-1px;border:1px solid #0002}
"""

_SCRIPT = """
const tip = document.getElementById('tip'), wide = document.getElementById('wide');
document.addEventListener('mousemove', e => {
  const text = e.target.dataset && e.target.dataset.tip;
  tip.style.display = text ? 'block' : 'none';
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 6) + 'px';
  tip.style.top = Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 6) + 'px';
}); document.getElementById('zoom').addEventListener('input', e => { wide.style.width = e.target.value * 100
+ '%'; }); document.getElementById('transfers').addEventListener('change', e => {
  wide.classList.toggle('no-transfers', !e.target.checked);
});
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body>
{body}
<div id="tip"></div>
<script>{script}</script>
</body></html>
"""
