import dataclasses
import itertools
import json
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from mpmd.scheduling import (
    Costs,
    Link,
    Span,
    StageCosts,
    Timeline,
    chrome_trace,
    get_schedule,
    render_svg,
    render_text,
    simulate,
)
from mpmd.scheduling.render import COLOURS, IDLE_COLOUR, TRANSFER_COLOUR
from mpmd.scheduling.render_html import MEMORY_COLOURS, render_html
from mpmd.scheduling.render_svg import legible_width, ticks
from mpmd.scheduling.table import Phase, Task
from mpmd.scheduling.timeline import IDLE, TRANSFER
from tests.support.svg_texts import overlaps, text_boxes


def predicted() -> Timeline:
    costs = Costs.uniform(2, StageCosts(1e-3, 2e-3, residual_bytes=1000, output_bytes=10, parameter_bytes=5))
    return simulate(get_schedule("1f1b").table(2, 2, 2), costs, Link(latency_s=5e-4), title="1f1b <2>")


def measured() -> Timeline:
    """What a runtime would report: tasks that took a tenth longer, and something that is no task."""
    spans = [
        dataclasses.replace(s, start_s=s.start_s * 1.1, end_s=s.end_s * 1.1, note="")
        for s in predicted().spans
        if s.kind == "compute"
    ]
    optimizer = Span("mesh0", "optimizer & co", None, 0.02, 0.021)
    return Timeline((*spans, optimizer), ("mesh0", "mesh1"), "measured")


def test_the_chart_of_1f1b() -> None:
    line = simulate(get_schedule("1f1b").table(2, 2, 3), title="1f1b")
    assert render_text(line, 80) == (
        "1f1b\n"
        "mesh0 |[F0][F1]........[B0    ][F2][B1    ]....[B2    ]| idle  25.0%\n"
        "mesh1 |....[F0][B0    ][F1][B1    ][F2][B2    ]........| idle  25.0%\n"
        "      12 steps, bubble 25.0%, 4 columns per step\n"
    )


def test_the_chart_names_stages_where_a_mesh_has_several() -> None:
    line = simulate(get_schedule("interleaved_1f1b").table(4, 2, 2))
    assert "[0F0][0F1][2F0]" in render_text(line, 150)


def test_ticks_are_at_the_times_that_they_name() -> None:
    found = ticks(predicted())
    assert found[0] == (0.0, "0 ms") and 5 <= len(found) <= 12
    assert [round(seconds * 1e3, 9) for seconds, _ in found] == [float(text.split()[0]) for _, text in found]


def test_a_narrow_chart_keeps_its_width() -> None:
    line = simulate(get_schedule("zb_h1").table(4, 4, 32))
    lines = render_text(line, 60).splitlines()
    assert {text.rindex("|") - text.index("|") for text in lines[:4]} == {61}
    assert {"F", "I", "W"} <= set("".join(lines[:4]))


def test_an_empty_timeline_has_a_chart_too() -> None:
    assert render_text(Timeline((), ("mesh0",))) == "(nothing ran)\n"
    ElementTree.fromstring(render_svg(Timeline((), ("mesh0",))))


def test_the_picture_has_a_rectangle_per_task_as_long_as_the_task() -> None:
    line = predicted()
    root = ElementTree.fromstring(render_svg(line, width=1000))
    groups = root.findall("{http://www.w3.org/2000/svg}g")
    assert len(groups) == 8
    lane = next(r for r in root.findall("{*}rect") if r.attrib["fill"] == IDLE_COLOUR).attrib
    scale = float(lane["width"]) / line.makespan_s
    assert 700 < float(lane["width"]) < 1000
    boxes = {g.findtext("{*}title").splitlines()[0]: g.find("{*}rect").attrib for g in groups}  # type: ignore[union-attr]
    for mesh in line.meshes:
        for span in line.compute(mesh):
            assert abs(float(boxes[span.name]["width"]) - span.seconds * scale) < 0.01
            assert abs(float(boxes[span.name]["x"]) - float(lane["x"]) - span.start_s * scale) < 0.01
    assert "1f1b <2>" in "".join(root.itertext())


class Boxes(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tips: list[tuple[str, str]] = []
        self.headings: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.open.append(tag)
        if tag == "i":
            self.tips.append((str(found["class"]).split()[0], str(found["data-tip"])))
        self.links += [str(found[k]) for k in ("src", "href") if k in found]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass


def test_the_page_shows_both_timelines_and_says_why_a_mesh_idles() -> None:
    page = Boxes()
    text = render_html(predicted(), measured())
    page.feed(text)
    assert page.headings[:2] == ["1f1b <2>", "mesh0"]
    assert page.links == []  # nothing is loaded from elsewhere
    kinds = [kind for kind, _ in page.tips]
    assert kinds.count("F") == kinds.count("B") == 8
    assert kinds.count("send") == 4
    assert kinds.count("x") == 1
    tips = "\n\n".join(tip for _, tip in page.tips)
    assert "0B0 waits for 1B0 on mesh1" in tips
    assert "stage 0, microbatch 0, forward\n" in tips
    assert "in the other timeline 1 ms (1.10 times)" in tips
    assert "1015 B held on mesh0" in tips
    assert "optimizer & co" in tips
    assert text.count("data-memory=") == 2 * 2  # the measured one has no bytes: its lanes say so


def test_the_page_works_without_a_measurement() -> None:
    page = Boxes()
    page.feed(render_html(predicted(), title="only predicted"))
    assert page.headings[0] == "only predicted"
    assert len([kind for kind, _ in page.tips if kind in "FB"]) == 8


def crowded() -> Timeline:
    """Transfers that overlap, follow each other at once, take no time, and go both ways."""
    times = ((0, 3), (1, 2), (2, 5), (3, 3), (3, 6), (5, 5), (5, 7.0000004))
    spans = [
        Span("a", f"x{k}", None, t0 * 1e-6, t1 * 1e-6, TRANSFER, "b") for k, (t0, t1) in enumerate(times)
    ]
    spans += [Span("b", "y", None, 1e-6, 1e-6, TRANSFER, "a"), Span("b", "z", None, 0.0, 4e-6, TRANSFER, "c")]
    spans += [Span("a", f"f{k}", None, k * 1.0000003e-6, (k + 1) * 1.0000003e-6) for k in range(9)]
    return Timeline(tuple(spans), ("a", "b", "c"))


def test_a_reader_of_the_trace_loses_no_slice_and_no_arrow() -> None:
    for lines in ((crowded(),), (predicted(), measured()), (crowded(), crowded())):
        events = json.loads(chrome_trace(*lines))["traceEvents"]
        slices = [e for e in events if e["ph"] == "X"]
        drawn = sum(len(line.compute(mesh)) for line in lines for mesh in line.meshes)
        assert len(slices) == drawn + 2 * sum(len(line.transfers) for line in lines)
        assert lost_slices(slices) == []
        assert loose_arrows(slices) == []
        assert all(e["pid"] > 0 and e["tid"] > 0 for e in slices)
        of_thread = {e["tid"]: e["pid"] for e in slices}
        assert all(of_thread[e["tid"]] == e["pid"] for e in slices)
    broken = [
        {"name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 2, "bind_id": "0x1", "flow_in": True},
        {"name": "b", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "bind_id": "0x1", "flow_out": True},
    ]
    assert lost_slices(broken) == ["b"] and loose_arrows(broken) == ["0x1"]


def lost_slices(slices: list[dict[str, Any]]) -> list[str]:
    """What Perfetto drops: slices that reach beyond the slice of their track within which they begin."""
    lost, open_until = [], dict[int, list[int]]()
    assert [e["ts"] for e in slices] == sorted(e["ts"] for e in slices)
    for event in slices:
        assert event["dur"] >= 0 and type(event["ts"]) is type(event["dur"]) is int
        stack = open_until.setdefault(event["tid"], [])
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        end = event["ts"] + event["dur"]
        if stack and stack[-1] < end:
            lost.append(event["name"])
        else:
            stack.append(end)
    return lost


def test_arrows_go_from_the_slice_that_sends_to_the_one_that_receives() -> None:
    """Each is bound to both slices by its number, so that it holds for those that take no time, too."""
    for line in (crowded(), predicted()):
        events = json.loads(chrome_trace(line))["traceEvents"]
        process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        track = {e["tid"]: e["args"]["name"].split(" (")[0] for e in events if e["name"] == "thread_name"}
        out, into = (
            {
                e["bind_id"]: (process[e["pid"]], track[e["tid"]], e["name"], e["ts"])
                for e in events
                if way in e
            }
            for way in ("flow_out", "flow_in")
        )
        wanted = sorted((s.mesh, s.peer, s.name, round(s.start_s * 1e6)) for s in line.transfers)
        assert sorted((out[k][0], into[k][0], *out[k][2:]) for k in out) == wanted
        assert set(out) == set(into) and len(out) == len(wanted)
        for number, (sender, way, *transfer) in out.items():
            receiver, back, *same = into[number]
            assert (way, back) == (f"to {receiver}", f"from {sender}") and transfer == same


def loose_arrows(slices: list[dict[str, Any]]) -> list[str]:
    """Flows that do not go from one slice to a later one of the same transfer in another process."""
    flows = dict[str, list[dict[str, Any]]]()
    for event in slices:
        if "bind_id" in event:
            flows.setdefault(event["bind_id"], []).append(event)
    return [
        name
        for name, ends in flows.items()
        if [("flow_out" in e, "flow_in" in e) for e in ends] != [(True, False), (False, True)]
        or len({(e["name"], e["ts"], e["dur"]) for e in ends}) > 1
        or len({e["pid"] for e in ends}) < 2
    ]


def test_a_breakdown_adds_up() -> None:
    spans = (
        Span("a", "f", None, 0.0, 2.0),
        Span("a", "idle", None, 2.0, 3.0, IDLE),
        Span("a", "idle", None, 3.0, 3.5, IDLE, "b"),
        Span("a", "g", None, 3.5, 4.0),
        Span("b", "h", None, 0.0, 3.0),
    )
    line = Timeline(spans, ("a", "b"))
    assert line.breakdown("a") == {"busy": 2.5, "transfer": 0.5, "idle": 1.0}
    assert line.breakdown("b") == {"busy": 3.0, "transfer": 0.0, "idle": 1.0}


def test_the_trace() -> None:
    line = predicted()
    events = json.loads(chrome_trace(line, measured()))["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X" and e["cat"] == "compute"]
    assert len(tasks) == 8 + 8 + 1
    first = next(e for e in tasks if e["name"] == "1B0")
    assert first["args"] == {"stage": 1, "microbatch": 0, "phase": "B"}
    assert (first["ts"], first["dur"]) == (2500, 2000)
    (sourced,) = json.loads(
        chrome_trace(Timeline((Span("a", "f", None, 0.0, 1.0, source="f (m.py:3)"),), ("a",)))
    )["traceEvents"][-1:]
    assert sourced["args"] == {"source": "f (m.py:3)"}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["1f1b <2>: mesh0", "1f1b <2>: mesh1", "measured: mesh0", "measured: mesh1"]
    sent = [e for e in events if e["ph"] == "X" and e["cat"] == "transfer"]
    assert {e["args"]["bytes"] for e in sent if e["name"].startswith("0F")} == {10}
    counters = [e for e in events if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counters) == max(m.peak_bytes for m in line.memory)
    assert [
        e["args"]["name"]
        for e in json.loads(chrome_trace(line))["traceEvents"]
        if e["name"] == "process_name"
    ] == [
        "mesh0",
        "mesh1",
    ]


def gpu_step() -> Timeline:
    """Two stages of a second of different sizes, a merged backward, an optimizer, long names."""
    spans = [
        Span("decoder_layers_0_to_15", "f", Task(0, 12, Phase.F), 0.0, 1.0),
        Span("decoder_layers_0_to_15", "b", Task(0, 12, Phase.B), 1.0, 1.05),
        Span("m1", "p9_inferred.train_step", None, 1.05, 1.2),
        Span("m1", "fb", Task(1, 12, Phase.B), 1.2, 3.0, with_forward=True),
    ]
    note = "train_step, measured, clocks of 8 processes aligned within 0.12 ms, times of threads that watch"
    return Timeline(tuple(spans), ("decoder_layers_0_to_15", "m1"), note)


@pytest.mark.parametrize("width", (420, 736, 1300, 3000, None))
def test_no_texts_of_a_picture_overlap(width: int | None) -> None:
    shapes = (("1f1b", 2, 2, 2), ("zb_h1", 4, 4, 8), ("interleaved_1f1b", 8, 4, 8), ("gpipe", 16, 16, 20))
    lines = [simulate(get_schedule(name).table(*shape), title=name) for name, *shape in shapes]
    for timelines in (*((line,) for line in lines), lines[:3], (predicted(), measured()), (gpu_step(),)):
        chosen = width or legible_width(*timelines)
        picture = render_svg(*timelines, width=chosen)
        assert overlaps(picture) == [] and f'width="{chosen}"' in picture


def test_labels_are_as_long_as_they_have_room() -> None:
    line = simulate(get_schedule("interleaved_1f1b").table(8, 4, 8))
    assert 'width="736"' in render_svg(line)
    seen = {
        wide: [text for text, *_ in text_boxes(render_svg(line, width=wide))] for wide in (420, 736, 2000)
    }
    assert "0F0" in seen[2000] and "0F0" not in seen[736]
    assert sum(text.isdigit() for text in seen[736]) >= 4 * 32  # all tasks have their microbatch
    assert sum(text.isdigit() for text in seen[420]) < 4 * 32
    assert "0F0" in [text for text, *_ in text_boxes(render_svg(line, width=legible_width(line)))]


def test_texts_that_overlap_are_found() -> None:
    picture = render_svg(predicted(), width=300)
    assert overlaps(picture) == []
    moved = picture.replace("</svg>", '<text x="8" y="45">there</text></svg>')
    assert [pair for pair in overlaps(moved) if "there" in pair]


def test_a_merged_task_is_drawn_as_both() -> None:
    picture, page = render_svg(gpu_step(), width=1300), render_html(gpu_step())
    root = ElementTree.fromstring(picture)
    (merged,) = (g for g in root.iter("{http://www.w3.org/2000/svg}g") if g.findtext("{*}text") == "FB12")
    assert [r.attrib["fill"] for r in merged.findall("{*}rect")] == [COLOURS["B"], COLOURS["F"]]
    assert "forward and backward" in picture and "microbatch 12, forward and backward" in page
    assert 'class="FB' in page and "i.FB{background:linear-gradient" in page
    assert "[FB12" in render_text(gpu_step())


def test_times_and_bytes_are_in_units_that_suit_them() -> None:
    tips = render_html(
        Timeline(
            (
                Span("a", "f", None, 0.0, 3.2e-5, source="stage0 (/srv/models/src/model.py:7, in loss)"),
                Span("a", "g", None, 3.2e-5, 12.5),
                Span("a", "x", None, 0.0, 1e-3, TRANSFER, "b", 3 << 20),
            ),
            ("a", "b"),
        )
    )
    assert "32 µs" in tips and "12.5 s" in tips and "3 MiB" in tips
    assert "stage0 (src/model.py:7, in loss)" in tips


def test_a_colour_has_one_meaning() -> None:
    """Those of phases, transfers and memory differ in what one sees: at least 24 of 255 in some channel."""
    named = {**COLOURS, "transfer": TRANSFER_COLOUR, **MEMORY_COLOURS}
    of = {colour: [int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in named.values()}
    for colour, other in itertools.combinations(of, 2):
        assert max(abs(a - b) for a, b in zip(of[colour], of[other], strict=True)) >= 24, (colour, other)
