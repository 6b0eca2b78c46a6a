"""The page that steps through a run of passes."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import mpmd
from mpmd import ir
from mpmd.compile.backends.targets import DESCRIBED
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.thunks.program_costs import fragment_costs
from mpmd.errors import PassError
from mpmd.options import DIALECT_DEFAULTS
from mpmd.partition import pipeline
from mpmd.passes.bases import mlir_pass
from mpmd.passes.verify import verify
from mpmd.support.passes import Watch, run_pipeline
from mpmd.tools import opt
from mpmd.tools.explorer import PassRecorder, PipelinePass, explore
from mpmd.tools.explorer.text_tree import Namer, Numbering, pair, read_tree
from tests.support import random_mpmd
from tests.support.ir_programs import HEAD, TWO_FRAGMENTS
from tests.support.poison import poison

DRIVER = Path(__file__).parents[2] / "support" / "page_driver.js"
PASSES = ["-mpmd-fragment-dedup", "-mpmd-merge-inferred-fragments", "-mpmd-copy-constants", "-cse"]
VOID = {"meta", "input"}


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def page_of(tmp_path: Path, text: str, *arguments: str, status: int = 0) -> str:
    source, target = tmp_path / "in.mlir", tmp_path / "out.html"
    source.write_text(text)
    assert opt.main([str(source), *arguments, f"-html={target}", f"-o={tmp_path / 'out.mlir'}"]) == status
    return target.read_text(encoding="utf-8")


def replayed(data: dict[str, Any]) -> list[str]:
    """The text after each step, from what the page says became of the lines."""
    lines, texts = [], []
    for step in data["steps"]:
        waiting, after = list(lines), []
        for sign, *rest in step.get("lines", [["=", len(lines)]]):
            if sign in "=-<":
                gone, waiting = waiting[: rest[0]], waiting[rest[0] :]
                after += gone if sign == "=" else []
            else:
                after += rest
                waiting = waiting[len(rest) :] if sign == "~" else waiting
        assert not waiting
        lines = after
        texts.append("\n".join(data["lines"][i] for i in lines) + "\n")
    return texts


def function(results: str, returned: str) -> str:
    """A function of two arguments, %a on m1 and %b on no mesh."""
    return (
        f"{HEAD}func.func public @main(%a: !m1, %b: tensor<4xf32>) -> ({results}) "
        f"attributes {{topology = #topology}} {{\n  return {returned} : {results}\n}}\n"
    )


def drawn(data: dict[str, Any], step: int) -> list[tuple[str, str, str, list[int]]]:
    """Mesh, kind, label and sources of what a step's first graph shows."""
    found = []
    for i, (number, _, _, *back) in enumerate(data["steps"][step]["graphs"][0]["nodes"]):
        mesh, _, kind, label, _, _ = data["nodes"][number]
        found.append((mesh, kind, label, [i - b for b in back]))
    return found


def test_every_pass_is_listed_and_the_input_is_shown(tmp_path):
    data = data_of(page_of(tmp_path, TWO_FRAGMENTS, *PASSES))
    assert [s["title"] for s in data["steps"]] == ["input", *(p[1:] for p in PASSES)]
    assert data["title"] == "in.mlir" and data["findings"] == []
    assert ["lines" in s for s in data["steps"]] == [True, False, False, False, False]
    assert ir.to_text(ir.parse(replayed(data)[0])) == ir.to_text(ir.parse(TWO_FRAGMENTS))
    assert all(data["abouts"][s["about"]] for s in data["steps"])


def test_the_graph_shows_fragments_and_transfers_by_mesh(tmp_path):
    data = data_of(page_of(tmp_path, TWO_FRAGMENTS))
    assert data["steps"][0]["graphs"][0]["meshes"] == ["m1", "m2"]
    assert drawn(data, 0) == [
        ("m1", "forward", "f", []),
        ("m2", "transfer", "m1 → m2", [0]),
        ("m1", "backward", "g(1)", [0]),
    ]
    facts = dict(data["nodes"][0][-1])
    assert facts["origin"] == "f" and facts["microbatch"] == "1" and facts["mesh"] == "m1"
    assert facts["ops"] == "2" and facts["gives"] == "32 B in 2 values"
    assert dict(data["nodes"][1][-1])["bytes"] == "16 B in 1 value"


def test_a_node_knows_its_line(tmp_path):
    data = data_of(page_of(tmp_path, TWO_FRAGMENTS))
    lines = replayed(data)[0].splitlines()
    shown = [lines[line].split("mpmd.")[1] for _, line, *_ in data["steps"][0]["graphs"][0]["nodes"]]
    assert [re.split(r"[<\s]", text)[0] for text in shown] == ["fragment", "transfer", "fragment"]


def test_what_changed_is_marked(tmp_path):
    page = page_of(tmp_path, function("!m1", "%a"), "-mpmd-uniquify-function-inputs-outputs")
    data = data_of(page)
    last = data["steps"][-1]
    fates = {sign: rest for sign, *rest in last["lines"]}
    assert set(fates) == {"=", "+", "~"}
    assert "return" in data["lines"][fates["~"][0]] and "mpmd.fragment" in data["lines"][fates["+"][0]]
    assert [node[2] for node in last["graphs"][0]["nodes"]] == [1]
    assert drawn(data, 1) == [("m1", "unnamed", "unnamed", [])]


def test_an_op_that_moves_is_no_other_op(tmp_path):
    text = f"""{HEAD}
func.func public @main(%a: !m1, %b: !m1) -> (!m2, !m2) attributes {{topology = #topology}} {{
  %0 = mpmd.transfer %a : (!m1) -> !m2
  %1 = mpmd.fragment<mesh="m1", origin=["f"]> (%b) (%c: tensor<4xf32>) {{
    %9 = stablehlo.negate %c : tensor<4xf32>
    mpmd.return %9 : tensor<4xf32>
  }} : (!m1) -> !m1
  %2 = mpmd.fragment<mesh="m1", origin=["f"]> (%1) (%c: tensor<4xf32>) {{
    %9 = stablehlo.abs %c : tensor<4xf32>
    mpmd.return %9 : tensor<4xf32>
  }} : (!m1) -> !m1
  %3 = mpmd.transfer %1 : (!m1) -> !m2
  return %0, %3 : !m2, !m2
}}"""
    data = data_of(page_of(tmp_path, text, "-mpmd-move-transfers-to-producer"))
    fates = data["steps"][1]["lines"]
    (moved,) = ([data["lines"][i] for i in rest] for sign, *rest in fates if sign == ">")
    assert {sign for sign, *_ in fates} == {"=", "<", ">"}
    assert moved == ["    %3 = mpmd.transfer %1 : (!m1) -> !m2".replace("!m1", M1).replace("!m2", M2)]


M1, M2 = (f'!mpmd.mesh_tensor<"{mesh}", tensor<4xf32>>' for mesh in ("m1", "m2"))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("seed", range(12))
def test_names_that_last_leave_the_program_as_it_is(seed):
    """After every pass the text with lasting names is the module, and the page holds it."""
    module, recorder, texts = ir.parse(random_mpmd.traced(seed)), PassRecorder(), []
    options = dataclasses.replace(DIALECT_DEFAULTS,
        name_to_mesh_assignment=random_mpmd.assignment(seed), infer_transfers=True,
        fail_on_inferred_fragments=False, keep_microbatches_equal=bool(seed % 2),
    )  # fmt: skip

    def after(pass_, module, changed, seconds):
        recorder.pass_ended(pass_, module, changed, seconds)
        texts.append(recorder.text())
        assert ir.to_text(ir.parse(texts[-1])) == ir.to_text(ir.parse(ir.to_text(module)))

    recorder.start(module)
    texts.append(recorder.text())
    steps = [s for make in pipeline.PIPELINES.values() for s in make(options) if make.__name__[:5] != "infer"]
    try:
        run_pipeline(module, [s.pass_ for s in steps], Watch(verify, ir.to_text, after=after))
    except PassError:
        assert len(texts) > 5
    assert replayed(data_of(recorder.page("", []))) == texts


def test_a_name_stays_where_lines_above_it_go():
    before = (
        "func.func @f(%arg0: i32) -> i32 {\n  %0 = a.x %arg0 : i32\n  %1 = a.y %arg0 : i32\n  return %1\n}"
    )
    after = "func.func @f(%arg0: i32) -> i32 {\n  %0 = a.y %arg0 : i32\n  %1 = a.z %0 : i32\n  return %1\n}"
    assert lasting_names(before, after).splitlines()[1:-1] == [
        "  %1 = a.y %arg0 : i32",
        "  %2 = a.z %1 : i32",
        "  return %2",
    ]


def test_an_argument_goes_by_its_operand():
    before = (
        '%2 = mpmd.fragment<mesh="m", origin=[]> (%a, %b) (%arg0: i32, %arg1: i32) {\n  a.r %arg0, %arg1\n}'
    )
    after = '%2 = mpmd.fragment<mesh="m", origin=[]> (%b) (%arg0: i32) {\n  a.r %arg0\n}'
    assert lasting_names(before, after).splitlines() == [
        '%2 = mpmd.fragment<mesh="m", origin=[]> (%b) (%arg1: i32) {',
        "  a.r %arg1",
        "}",
    ]


def lasting_names(*texts: str) -> str:
    numbering, namer, last = Numbering(), Namer(), []
    for text in texts:
        tree = read_tree(text)
        numbering.number(tree)
        pair(last, tree)
        namer.name(tree)
        last = tree
    return "\n".join(line for op in last for line in op.lines())


def test_equal_runs_give_equal_pages(tmp_path):
    import_ = f"-mpmd-import-pipeline=name-to-mesh-assignment={','.join(random_mpmd.assignment(0))}"
    first, second = (page_of(tmp_path, random_mpmd.traced(0), import_) for _ in range(2))
    assert first == second and '"ms":' not in first
    assert '"ms":' in page_of(tmp_path, random_mpmd.traced(0), import_, "-timing")


def test_a_pipeline_says_why_its_passes_stand_there(tmp_path):
    data = data_of(page_of(tmp_path, TWO_FRAGMENTS, "-mpmd-sharding-propagation-pipeline"))
    steps = data["steps"][1:]
    assert {s["phase"] for s in steps} == {"mpmd-sharding-propagation-pipeline"}
    wanted = pipeline.sharding_propagation_pipeline(DIALECT_DEFAULTS)
    assert [s["why"] for s in steps] == [step.why for step in wanted]


class Tags(html.parser.HTMLParser):
    """Checks that what is opened is closed, and remembers all ids and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_whatever_the_program_says(tmp_path):
    evil = "</script><!-- <script> & \\22"
    text = TWO_FRAGMENTS.replace("attributes {topology", f'attributes {{evil = "{evil}", topology')
    page = page_of(tmp_path, text, *PASSES)
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == [] and tags.addresses == [] and len(set(tags.ids)) == len(tags.ids)
    assert any(evil in line for line in data_of(page)["lines"])
    assert "@@" not in page.replace("@@", "", 0).partition('id="data"')[0]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert {*re.findall(r'\bel\("([\w-]+)"\)', page)} <= set(tags.ids)


def test_a_large_constant_is_cut(tmp_path):
    constant = "dense<[" + ", ".join(map(str, range(20_000))) + "]> : tensor<20000xi32>"
    text = f"func.func @main() -> tensor<20000xi32> {{\n  %0 = stablehlo.constant {constant}\n"
    data = data_of(page_of(tmp_path, text + "  return %0 : tensor<20000xi32>\n}", "-cse"))
    (line,) = (line for line in data["lines"] if "stablehlo.constant" in line)
    assert len(line) < 70_000 and line.endswith("more characters")


def test_a_run_that_fails_shows_where(tmp_path, capsys):
    text = function("!m1, tensor<4xf32>", "%a, %b")
    passes = ("-cse", "-mpmd-uniquify-function-inputs-outputs", "-mpmd-fragment-dce")
    data = data_of(page_of(tmp_path, text, *passes, status=1))
    assert (
        len(data["findings"]) == 1
        and "result 1 of @main is a tensor<4xf32>, on no mesh" in data["findings"][0]
    )
    assert [s["outcome"] for s in data["steps"]] == ["ran", "ran", "failed", "left"]
    capsys.readouterr()


def test_what_was_planned_for_one_module_is_over_at_the_next():
    recorder, passes = PassRecorder(), [PipelinePass(mlir_pass("cse")), PipelinePass(mlir_pass("symbol-dce"))]
    for _ in range(2):
        recorder.start(ir.parse(TWO_FRAGMENTS), passes)
    recorder.finish()
    assert [(s.title, s.outcome) for s in recorder.steps] == [
        ("input", "ran"), ("cse", "failed"), ("symbol-dce", "left"),
    ] * 2  # fmt: skip


def step(w, x):
    first = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="first")
    second = mpmd.named_computation(lambda w, x: jnp.mean((x @ w) ** 2), name="second")
    return mpmd.accumulate_gradients(lambda w, x: second(w, first(w, x)), num_microbatches=4)(w, x)


def traced(assignment):
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), assignment)
    # JAX traces functions of jax.numpy once for shapes: those of no other test, or lines would be theirs
    return mpmd.jit(step, config).trace(jnp.eye(11), jnp.ones((8, 11)))


@pytest.fixture(scope="module")
def explored(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "step.html"
    with poison(False):  # a page for users
        lowered = explore(traced({"first": "m0", "second": "m1"}), path)
    return path, lowered


def test_a_page_tells_times_only_if_asked(explored, tmp_path):
    assert '"ms":' not in explored[0].read_text(encoding="utf-8")
    timed = tmp_path / "timed.html"
    explore(traced({"first": "m0", "second": "m1"}), timed, timing=True)
    assert '"ms":' in timed.read_text(encoding="utf-8")


def test_a_step_is_explored_from_tracing_to_export(explored):
    path, lowered = explored
    data = data_of(path.read_text(encoding="utf-8"))
    assert data["title"] == "step" and data["steps"][0]["title"] == "traced"
    assert list(dict.fromkeys(s.get("phase") for s in data["steps"])) == [
        None, "import", "optimize", "sharding", "export",
    ]  # fmt: skip
    assert ir.to_text(ir.parse(replayed(data)[-1])) == ir.to_text(ir.parse(lowered.as_text("mpmd")))
    last = [s for s in data["steps"] if "graphs" in s][-1]
    kinds = [data["nodes"][node[0]][2] for node in last["graphs"][0]["nodes"]]
    assert kinds.count("forward") == kinds.count("both") == kinds.count("backward") == 4
    assert kinds.count("transfer") == lowered.as_text("mpmd").count("mpmd.transfer ") >= 8


def sources_of(data: dict[str, Any], texts: list[str]) -> list[list[Any]]:
    """For each step the source of each line of its text, as the page carries them on."""
    known: list[int] = []
    after, found = iter(texts), []
    for step in data["steps"]:
        if "lines" in step:
            old, carried = iter(known), []
            for sign, *rest in step["lines"]:
                for _ in range(rest[0] if sign in "=-<" else len(rest)):
                    source = next(old) if sign in "=-<~" else -1
                    carried += [source] if sign in "=~" else [-1] if sign in "+>" else []
            for line, source in zip(step["sources"][::2], step["sources"][1::2], strict=True):
                carried[line] = source
            known = carried
        found.append([data["sources"][number] for number in known])
        assert len(found[-1]) == len(next(after).splitlines())
    return found


def test_each_op_has_its_line_of_the_model(explored):
    """After every pass: the products of both stages are where they are written, with what called them."""
    data = data_of(explored[0].read_text(encoding="utf-8"))
    texts = replayed(data)
    seen = {"tanh": set(), "dot_general": set()}
    for text, sources in zip(texts, sources_of(data, texts), strict=True):
        for line, frames in zip(text.splitlines(), sources, strict=True):
            for op, codes in seen.items():
                if f"stablehlo.{op} " in line:
                    place, code = frames[0]
                    assert re.search(r"test_explorer\.py:\d+, in step", place)
                    codes.add(code)
    assert [len(codes) for codes in seen.values()] == [1, 2]
    assert all("jnp.tanh(x @ w)" in code for code in seen["tanh"])


def test_each_fragment_says_where_it_is_written_and_why_it_is_there(explored):
    data = data_of(explored[0].read_text(encoding="utf-8"))
    last = [step for step in data["steps"] if "graphs" in step][-1]
    facts = [dict(data["nodes"][number][-1]) for number, *_ in last["graphs"][0]["nodes"]]
    fragments = [fact for fact in facts if "origin" in fact]
    assert [fact["from"] for fact in facts if "code" not in fact] == ["the argument w"]
    assert all("test_explorer.py:" in fact["from"] for fact in facts if "code" in fact)
    named = [fact for fact in fragments if "inferred" not in fact["origin"]]
    assert {fact["why here"] for fact in named if fact["mesh"] == "m0"} == {"the assignment has first on m0"}
    assert {fact["on this mesh since"] for fact in named} == {"mpmd-map-named-ops-to-mpmd-ops"}
    unnamed = [fact for fact in fragments if fact not in named]
    assert unnamed and all(fact["why here"].startswith("it has no name; ") for fact in unnamed)
    assert "it has no name; read here by first" in {fact["why here"] for fact in unnamed}
    assert all("infer-mesh" in fact["on this mesh since"] for fact in unnamed)


def test_lines_have_the_locations_of_their_ops():
    """Also the lines with which an op begins, whose location MLIR prints at its end."""
    text = ir.to_text(ir.parse(TWO_FRAGMENTS))
    places = [int(place.split(":")[1]) for place in ir.line_locations(ir.parse(text))]
    begins, wanted = dict[int, int](), list[int]()
    for number, line in enumerate(text.splitlines(), 1):
        indent = len(line) - len(line.lstrip())
        begins[indent] = begins[indent] if line.lstrip().startswith("}") else number
        wanted.append(begins[indent])
    assert places == wanted


def test_the_page_has_the_kernels_of_each_fragment(explored, unpoisoned):
    path, lowered = explored
    kernels = data_of(path.read_text(encoding="utf-8"))["kernels"]
    assert set(kernels) == set(lowered.fragments)
    made = prepare_fragment(lowered.fragments["p3_second_fwd_bwd_calls0to3.step"], DESCRIBED["cpu"]())
    nodes = kernels["p3_second_fwd_bwd_calls0to3.step"]
    assert [node[0] for node in nodes] == [thunk.name for thunk in made.thunks]
    total = sum(k.seconds for k in fragment_costs(made.thunks, made.module, made.target.device).kernels)
    assert sum(node[3] for node in nodes) == pytest.approx(total) and total > 0
    for i, (*_, reads, writes, sources) in enumerate(nodes):
        assert writes and all(source < i for source in sources)
        written = {name for buffer, _ in reads for name in buffer.partition("written by ")[2].split(", ")} - {
            ""
        }
        assert {nodes[source][0] for source in sources} == written
    assert any(node[-1] for node in nodes)
    assert any(buffer.startswith("argument 0") and size == 11 * 11 * 4 for buffer, size in nodes[0][6])


def test_a_step_that_cannot_be_lowered_leaves_a_page(tmp_path):
    with pytest.raises(mpmd.errors.MpmdError):
        explore(traced({"first": "m0", "second": "m1", "third": "m1"}), tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()  # it was refused before the first pass
    options = dataclasses.replace(DIALECT_DEFAULTS)  # mesh inference may insert no transfers
    config = mpmd.make_config(
        mpmd.make_topology({"m0": 1, "m1": 1}), {"first": "m0", "second": "m1"}, options=options
    )
    with pytest.raises(PassError):
        explore(mpmd.jit(step, config).trace(jnp.eye(4), jnp.ones((8, 4))), tmp_path / "some.html")
    data = data_of((tmp_path / "some.html").read_text(encoding="utf-8"))
    assert "failed" in [s["outcome"] for s in data["steps"]] and data["findings"][0].startswith("error: ")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script with node")
def test_the_script_shows_every_step_in_every_way(explored):
    path, lowered = explored
    data = data_of(path.read_text(encoding="utf-8"))
    done = subprocess.run(["node", str(DRIVER), str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = json.loads(done.stdout)
    assert [s["position"] for s in shown["shown"]] == [
        f"step {i} of {len(data['steps']) - 1}" for i in range(len(data["steps"]))
    ]
    assert shown["back"] == "step 0 of " + str(len(data["steps"]) - 1)
    for entry, seen in zip(data["steps"], shown["shown"]):
        marked = bool(re.search(r'class="row (?:new|gone|moved)"', seen["html"]))
        assert marked == ("lines" in entry and entry["title"] != "traced"), entry["title"]
    last = shown["shown"][-1]
    assert last["lanes"] == ["m0", "m1"] and last["boxes"] >= 12
    assert last["wires"] == lowered.as_text("mpmd").count("mpmd.transfer ")
    assert all(tip for tip in last["tips"])
    # All lines are there once what is folded is unfolded.
    i = max(i for i, entry in enumerate(data["steps"]) if "lines" in entry)
    numbers = re.findall(r' data-line="(\d+)"', shown["shown"][i]["unfolded"])
    assert sorted(map(int, numbers)) == list(range(len(replayed(data)[i].splitlines())))
