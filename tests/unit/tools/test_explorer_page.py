"""The explorer's page in a browser: what clicks and keys do to what is seen."""

from __future__ import annotations

import itertools

import pytest

from examples.workloads.sleeping import Durations, Stages
from mpmd import ir
from mpmd.passes.bases import mlir_pass
from mpmd.tools.explorer import PassRecorder, explore
from tests.support import browser
from tests.support.browser import Browser
from tests.support.ir_programs import HEAD
from tests.support.poison import poison

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
def opened(tmp_path_factory):
    """A browser, and the page of that program and two passes that changed nothing."""
    folder = tmp_path_factory.mktemp("explorer")
    recorder, module = PassRecorder(), ir.parse(long_program())
    recorder.start(module)
    recorder.pass_ended(mlir_pass("canonicalize"), module, False, 0.0)
    recorder.pass_ended(mlir_pass("cse"), module, False, 0.0)
    path = folder / "page.html"
    path.write_text(recorder.page("long", []), encoding="utf-8")
    with Browser(folder / "profile") as browser_:
        yield browser_, path


@pytest.fixture
def page(opened):
    """The browser with that page."""
    browser_, path = opened
    browser_.look(1200, "light")
    browser_.open(path)
    return browser_


OPERANDS = 150


def many_operands(without: int | None = None) -> str:
    """A fragment that reads many values, all or all but one."""
    read = [k for k in range(OPERANDS) if k != without]
    arguments = ", ".join(f"%v{k}: !m1" for k in range(OPERANDS))
    inside = ", ".join(f"%p{k}: tensor<4xf32>" for k in read)
    return (
        f"{HEAD}func.func public @main({arguments}) -> !m1 attributes {{topology = #topology}} {{\n"
        f'%r = mpmd.fragment<mesh="m1", origin=["f"]> ({", ".join(f"%v{k}" for k in read)}) ({inside}) {{\n'
        "%s = stablehlo.add %p0, %p149 : tensor<4xf32>\nmpmd.return %s : tensor<4xf32>\n"
        f"}} : ({', '.join('!m1' for _ in read)}) -> !m1\nreturn %r : !m1\n}}"
    )


def test_a_change_inside_of_a_long_list_is_seen(page, tmp_path):
    recorder = PassRecorder()
    recorder.start(ir.parse(many_operands()))
    recorder.pass_ended(mlir_pass("cse"), ir.parse(many_operands(77)), True, 0.0)
    path = tmp_path / "long.html"
    path.write_text(recorder.page("long", []), encoding="utf-8")
    page.open(path)
    page.run("show(1); await frames(2);")
    row = 'document.querySelector(".row.gone")'
    assert page.run(f'return {row}.querySelector("em").textContent;').strip() == "%arg77,"
    assert page.run(f"return {row}.getBoundingClientRect().height;") < 100
    assert page.run(f'return {row}.querySelectorAll("em").length;') == 2  # an operand, and its argument
    assert page.run("return document.documentElement.scrollWidth <= innerWidth;")
    shown = f'[...{row}.querySelectorAll("code > span[hidden]")].length'
    assert page.run(f"return {shown};") > 0
    page.run(f'{row}.querySelectorAll(".gap").forEach(button => button.click());')
    whole = page.run(f'return {row}.querySelector("code").textContent;')
    assert page.run(f"return {shown};") == 0 and whole == page.run("return shown(data.steps[1].rows[2][1]);")


def test_words_that_differ_are_the_fewest(page):
    """Both sides without what is marked are equal, and as long as the longest common subsequence."""
    page.run("show(0);")
    a, b = "the quick brown fox jumps over a lazy dog", "a quick red fox jumped over the dog"
    common = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, j in itertools.product(range(len(a)), range(len(b))):
        same = common[i][j] + 1 if a[i] == b[j] else 0
        common[i + 1][j + 1] = max(common[i][j + 1], common[i + 1][j], same)
    left, right, kept = page.run(
        f"const a = [...{a!r}], b = [...{b!r}];"
        """
      const [gone, came] = differing(a, b);
      const rest = (words, marked) => words.filter((_, i) => !marked.has(i)).join("");
      return [rest(a, gone), rest(b, came), a.length - gone.size];
    """
    )
    assert left == right and kept == len(left) == common[-1][-1]


@pytest.mark.parametrize("theme", ("light", "dark"))
@pytest.mark.parametrize("width", (420, 1300))
def test_a_step_can_be_read(page, tmp_path_factory, width, theme):
    """Every page that a user's step gives: contrast, width, its lines of the model and why it is there."""
    path = tmp_path_factory.mktemp("step") / "step.html"
    with poison(False):
        stages = Stages((Durations(0.0, 0.0, 0.0),) * 2, 2, 2)
        explore(stages.jitted("1f1b").trace(*stages.arguments()), path)
    page.look(width, theme)
    page.open(path)
    last = page.run("return data.steps.length - 1;")
    changed = page.run("return data.steps.findLastIndex(step => step.changed);")
    for number in (0, changed, last):
        page.run(f"show({number}); await frames(2);")
        assert not page.is_too_wide() and page.faint_texts() == []
        assert page.run('return el("steps").querySelector("[aria-current=true]") !== null;')
    page.run(f"show({changed}); await frames(2);")
    tip = page.run("""
      const box = [...document.querySelectorAll("#scroll .box.forward")][0];
      box.dispatchEvent(new MouseEvent("mouseenter", { clientX: 10, clientY: 10 }));
      return [el("tip").innerText, el("tip").getBoundingClientRect().right <= innerWidth];
    """)
    assert "why here\tthe assignment has stage0 on m0" in tip[0] and "sleeping.py:" in tip[0] and tip[1]
    source = page.run(r"""
      const op = [...document.querySelectorAll(".row.new .o")]
        .find(o => /^stablehlo\.custom_call/.test(o.textContent));
      op.dispatchEvent(new MouseEvent("mouseover", { bubbles: true, clientX: 10, clientY: 10 }));
      return el("tip").innerText;
    """)
    assert "sleeping.py:" in source and "in the model" in source
    assert page.faint_texts() == [] and page.complaints == []


def test_ctrl_and_the_wheel_zoom_the_picture(page):
    page.look(1300, "light")
    width = 'return document.querySelector("#scroll .box rect").getBBox().width;'
    before = page.run("show(data.steps.length - 1); await frames(2); " + width)
    left, top = page.run('const b = el("scroll").getBoundingClientRect(); return [b.left + 30, b.top + 20];')
    page.wheel(left, top, -200, ctrl=True)
    assert page.run("await frames(4); " + width) > 1.5 * before


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
