"""The page of a timeline in a browser: wide and narrow, light and dark."""

from __future__ import annotations

import dataclasses

import pytest

from mpmd.scheduling import Costs, Link, StageCosts, get_schedule, simulate
from mpmd.scheduling.render_html import render_html
from mpmd.scheduling.render_svg import render_svg
from mpmd.scheduling.timeline import Timeline
from tests.support import browser
from tests.support.browser import Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.FOUND is None, reason="opens the page in Chromium"),
]
LOOKS = [(width, theme) for width in (420, 1300) for theme in ("light", "dark")]


def step(meshes: int, microbatches: int, slower: float = 1.0) -> Timeline:
    cost = StageCosts(
        1e-3 * slower, 2e-3, residual_bytes=3 << 20, output_bytes=1 << 18, parameter_bytes=5 << 20
    )
    table = get_schedule("1f1b").table(meshes, meshes, microbatches)
    return simulate(table, Costs.uniform(meshes, cost), Link(latency_s=5e-5), title="step")


def merged(line: Timeline) -> Timeline:
    """The same with a backward of the last mesh that computes its forward."""
    last = line.meshes[-1]
    spans = (
        dataclasses.replace(
            s, with_forward=s.mesh == last and s.task is not None and s.task.phase.is_backward
        )
        for s in line.spans
    )
    return dataclasses.replace(line, spans=tuple(spans), title="step, measured")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timelines")
    small, large = folder / "small.html", folder / "large.html"
    small.write_text(render_html(step(2, 4), merged(step(2, 4, 1.2))), encoding="utf-8")
    large.write_text(render_html(step(16, 64)), encoding="utf-8")
    with Browser(folder / "profile") as opened:
        yield opened, small, large
        assert opened.complaints == []


TICKS = """
  const box = el("scroll").getBoundingClientRect(), left = box.left + margin();
  const seen = [...el("ticks").children].map(t => [t.getBoundingClientRect(), t.textContent]);
  const inside = seen.filter(([b]) => b.left >= left - 1 && b.left <= box.right);
  inside.sort(([a], [b]) => a.left - b.left);
  const close = inside.slice(1).some(([b], k) => b.left < inside[k][0].right);
  return [inside.length, close, inside.map(([, text]) => text)];
"""
LABELS = """
  const over = tasks.filter(t => t.task.scrollWidth > t.task.clientWidth + 1).map(t => t.shown);
  return [tasks.filter(t => t.shown).length, over.filter(text => text).length, tasks.length];
"""


@pytest.mark.parametrize(("width", "theme"), LOOKS)
@pytest.mark.parametrize("which", ("small", "large"))
def test_it_can_be_read(pages, which, width, theme):
    page, small, large = pages
    page.look(width, theme)
    page.open(small if which == "small" else large)
    assert not page.is_too_wide()
    assert page.faint_texts() == []
    paper = page.run("return getComputedStyle(document.body).backgroundColor;")
    assert (paper == "rgb(255, 255, 255)") == (theme == "light")
    for factor in (1, 3, 17, 60, 1e9):
        page.run(f"zoomTo({factor}); await frames(2);")
        count, close, texts = page.run(TICKS)
        assert count >= 2 and not close and len(set(texts)) == count, (factor, texts)
        shown, cut, all_ = page.run(LABELS)
        assert cut == 0 and (shown > all_ / 2 or factor < 17)
    assert page.run("return [zoom, wide.clientWidth];")[0] > 20
    assert not page.is_too_wide()


def test_ctrl_and_the_wheel_zoom_where_the_pointer_is(pages):
    page, small, _ = pages
    page.look(1300, "light")
    page.open(small)
    place = (
        'const b = document.querySelectorAll("i.B")[1].getBoundingClientRect();'
        "return [b.left, b.top, b.width];"
    )
    left, top, width = page.run(place)
    page.wheel(left, top + 5, -400, ctrl=True)
    page.run("await frames(4);")
    after, _, wider = page.run(place)
    assert wider == pytest.approx(4 * width, rel=0.05) and after == pytest.approx(left, abs=3)
    page.wheel(left, top + 5, 100)
    page.run("await frames(4);")
    assert page.run(place)[2] == wider  # without Ctrl it scrolls


def test_what_is_under_the_pointer_is_explained(pages):
    page, small, _ = pages
    page.look(1300, "dark")
    page.open(small)
    point = (
        "const b = TARGET.getBoundingClientRect(); TARGET.dispatchEvent(new PointerEvent('pointermove',"
        "{bubbles: true, clientX: b.left + b.width / 2, clientY: b.top + 4})); return tip.textContent;"
    )
    task = page.run(point.replace("TARGET", 'document.querySelector("i.FB")'))
    assert "forward and backward" in task and "ms" in task and "MiB held on mesh1" in task
    memory = page.run(point.replace("TARGET", 'document.querySelector("[data-memory]")'))
    assert "residuals 6 MiB" in memory and memory.startswith(
        "mesh0: sizes of the program's buffers at the predicted times"
    )
    assert page.faint_texts() == []


def test_switches_hide_what_they_name(pages):
    page, small, _ = pages
    page.look(420, "light")
    page.open(small)
    for name, selector in (("memory", ".lane.memory"), ("transfers", ".lane.transfer")):
        shown = f'return document.querySelector("{selector}").getBoundingClientRect().height;'
        assert page.run(shown) > 0
        page.run(f'el("{name}").click();')
        assert page.run(shown) == 0
    path = 'return getComputedStyle(document.querySelector("i.critical")).boxShadow;'
    assert page.run(path) != "none"
    page.run('el("path").click();')
    assert page.run(path) == "none"


def test_no_texts_of_pictures_overlap_with_fonts_of_a_browser(pages, tmp_path):
    page, _, _ = pages
    lines = [merged(step(2, 4)), step(16, 20)]
    lines += [
        simulate(get_schedule(name).table(8, 4, 8), title=name) for name in ("interleaved_1f1b", "looped_bfs")
    ]
    pictures = [render_svg(line, width=width) for line in lines for width in (420, 736, 1300)]
    pictures.append(render_svg(*lines))
    path = tmp_path / "pictures.html"
    path.write_text('<meta charset="utf-8">' + "\n".join(pictures), encoding="utf-8")
    page.look(1300, "light")
    page.open(path)
    texts, found = page.run("""
      const found = [];
      for (const picture of document.querySelectorAll("svg")) {
        const width = picture.viewBox.baseVal.width;
        const texts = [...picture.querySelectorAll("text")];
        const boxes = texts.map(text => [text.getBBox(), text.firstChild.textContent]);
        boxes.sort(([a], [b]) => a.x - b.x);
        boxes.forEach(([a, text], k) => {
          if (a.x < 0 || a.x + a.width > width) found.push([width, text, "the edge"]);
          for (const [b, other] of boxes.slice(k + 1)) {
            if (b.x >= a.x + a.width) break;
            if (b.y < a.y + 0.8 * a.height && a.y < b.y + 0.8 * b.height) found.push([width, text, other]);
          }
        });
      }
      return [document.querySelectorAll("text").length, found];
    """)
    assert texts > 500 and found == []
