import dataclasses
import json
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

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
from mpmd.scheduling.render_html import render_html
from mpmd.scheduling.render_svg import ticks
from mpmd.scheduling.timeline import IDLE, TRANSFER


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
    scale = (1000 - 90 - 80) / line.makespan_s
    boxes = {g.findtext("{*}title").splitlines()[0]: g.find("{*}rect").attrib for g in groups}  # type: ignore[union-attr]
    for mesh in line.meshes:
        for span in line.compute(mesh):
            assert abs(float(boxes[span.name]["width"]) - span.seconds * scale) < 0.01
            assert abs(float(boxes[span.name]["x"]) - 90 - span.start_s * scale) < 0.01
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
            self.tips.append((str(found["class"]), str(found["data-tip"])))
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
    assert "1,015 bytes held on mesh0" in tips
    assert "optimizer & co" in tips
    assert text.count('class="lane bytes"') == 2


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
