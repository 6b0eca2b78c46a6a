"""The explorer's page in a browser: what clicks and keys do to what is seen."""

from __future__ import annotations

import pytest

from mpmd import ir
from mpmd.passes.bases import mlir_pass
from mpmd.tools.explorer import PassRecorder
from tests.support import browser
from tests.support.browser import Browser
from tests.support.ir_programs import HEAD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.FOUND is None, reason="opens the page in Chromium"),
]

FRAGMENTS, OPERATIONS = 300, 14


def long_program() -> str:
    """A chain of fragments, whose lines are long enough that estimates of their heights are wrong."""
    lines = [f"{HEAD}func.func public @main(%v0: !m1) -> !m1 attributes {{topology = #topology}} {{"]
    for k in range(FRAGMENTS):
        note = f'{{note = "{k * "word " if k % 3 == 0 else k}"}}'
        lines.append(f'%v{k + 1} = mpmd.fragment<mesh="m1", origin=["f"]> (%v{k}) (%p: tensor<4xf32>) {{')
        lines.append(f"%a0 = stablehlo.abs %p {note} : tensor<4xf32>")
        lines += [f"%a{i} = stablehlo.abs %a{i - 1} : tensor<4xf32>" for i in range(1, OPERATIONS)]
        lines.append(f"mpmd.return %a{OPERATIONS - 1} : tensor<4xf32>\n}} : (!m1) -> !m1")
    return "\n".join([*lines, f"return %v{FRAGMENTS} : !m1\n}}"])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of that program, opened, and two passes that changed nothing."""
    folder = tmp_path_factory.mktemp("explorer")
    recorder, module = PassRecorder(), ir.parse(long_program())
    recorder.start(module)
    recorder.pass_ended(mlir_pass("canonicalize"), module, False, 0.0)
    recorder.pass_ended(mlir_pass("cse"), module, False, 0.0)
    path = folder / "page.html"
    path.write_text(recorder.page("long", []), encoding="utf-8")
    with Browser(folder / "profile") as opened:
        opened.open(path)
        yield opened


SEEN = """
  const row = document.querySelector(".found"), box = el("main").getBoundingClientRect();
  const { top, bottom } = row.getBoundingClientRect();
  return [Number(row.dataset.line), row.textContent, top >= box.top && bottom <= box.bottom];
"""


@pytest.mark.parametrize("k", (0, 1, 99, 211, FRAGMENTS - 1))
def test_a_click_on_a_fragment_shows_its_row(page, k):
    page.run("show(0); await frames(1);")
    line, text, is_seen = page.run(
        f'document.querySelectorAll("#scroll .box")[{k}].dispatchEvent(new MouseEvent("click"));'
        "await frames(30);" + SEEN
    )
    assert "mpmd.fragment" in text and is_seen
    assert line == page.run(f"return data.steps[0].graphs[0].nodes[{k}][1];")


def test_enter_goes_from_hit_to_hit(page):
    page.run('show(0); await frames(1); el("find").focus();')
    for character in "mpmd.fragment":
        page.key(character, text=character)
    assert page.run('return el("hits").textContent;') == f"{FRAGMENTS} lines"
    lines = []
    for _ in range(3):
        page.key("Enter", text="\r")
        line, text, is_seen = page.run("await frames(30);" + SEEN)
        assert "mpmd.fragment" in text and is_seen
        lines.append(line)
    assert lines == sorted(set(lines)) and page.run('return el("hits").textContent;') == f"3 of {FRAGMENTS}"


def test_enter_goes_from_pass_to_pass(page):
    page.run('show(0); el("filter").focus();')
    seen = []
    for _ in range(3):
        page.key("Enter", text="\r")
        seen.append(page.run("return state.step;"))
    assert seen == [1, 2, 0]


def test_long_options_fold(page):
    many = "{" + " ".join(f"option-{i}=value" for i in range(20)) + "}"
    page.run(f'showTitle("pass", "{many}");')
    assert many not in page.run('return el("title").textContent;')
    assert "20 options" in page.run('return el("title").textContent;')
    page.run('el("title").querySelector("button").click();')
    assert many in page.run('return el("title").textContent;')
    page.run('showTitle("pass", "{short=1}");')
    assert page.run('return el("title").textContent;') == "pass{short=1}"


def test_a_kernel_shows_its_buffers(page):
    """A fragment with two kernels; the second reads the first one's result."""
    page.run(
        'data.kernels = { f: [["dot.1", "matmul 8x8x8", "compute", 3e-6, 1e3, 5e2, [["argument 0", 256]],'
        ' [["arena at 0", 256]], []], ["add.2", "kernel loop 8x8", "memory", 1e-6, 64, 5e2,'
        ' [["arena at 0, written by dot.1", 256]], [["result 0", 256]], [0]]] };'
        'const node = ["m1", "", "forward", "f", "f", [["calls", "@f"]]];'
        "showKernels({ drawn: [{ nodes: [[data.nodes.push(node) - 1]] }] });"
    )
    assert page.run('return el("cost").textContent;').startswith("2 kernels, 4.00 µs projected")
    first, second = page.run(
        'return [...document.querySelectorAll("#kernel-scroll .box rect")].map(r => r.getBBox().width);'
    )
    assert first == pytest.approx(3 * second)
    tip = page.run(
        'document.querySelectorAll("#kernel-scroll .box")[1].dispatchEvent(new MouseEvent("mouseenter"));'
        'return [el("tip").hidden, el("tip").innerText];'
    )
    assert tip[0] is False and "arena at 0, written by dot.1: 256 bytes" in tip[1] and "25.0 %" in tip[1]
