"""Records a run of passes, and writes it as a page, in which each line, text and node is once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from mpmd import ir
from mpmd.partition.pipeline import Step
from mpmd.passes.bases import MlirPass
from mpmd.scheduling.render import COLOURS
from mpmd.support.passes import Pass
from mpmd.support.user_code import frames_of
from mpmd.tools.explorer.module_graph import DRAWN_LINE, Graph, fresh_nodes, graphs_of
from mpmd.tools.explorer.text_tree import (
    CHANGED,
    KEPT,
    MOVED_HERE,
    NEW,
    Namer,
    Numbering,
    OpText,
    changes,
    pair,
    read_tree,
)

_MAX_LINE = 60_000
_MAX_FRAMES = 5


class _NumberTable:
    """Numbers for things, in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, thing: Hashable) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def things(self) -> list[Any]:
        return list(self._numbers)


def page_of(
    title: str, findings: Sequence[str], steps: Sequence[PassRun], timing: bool, kernels: Mapping[str, Any]
) -> str:
    """The page for these steps; with `timing` it says how long passes took.

    `kernels` are those of `kernels_of`, of the fragments that the last steps call.
    """
    lines, nodes, abouts, sources = (_NumberTable() for _ in range(4))
    packed = []
    shown: list[int] = []
    placed: dict[Hashable, str] = {}
    for step in steps:
        if step.kind is None:
            shown, placed = [], {}
        texts = {"title": step.title, "phase": step.phase, "why": step.why, "outcome": step.outcome}
        entry: dict[str, Any] = {key: text for key, text in texts.items() if text}
        entry["about"] = abouts.number(step.about)
        if step.lines is not None:
            entry["lines"] = _runs(step.lines, lines)
            known, shown = _carried(step.lines, shown), [sources.number(s) for s in step.sources]
            moved = [(i, new) for i, (old, new) in enumerate(zip(known, shown, strict=True)) if old != new]
            entry["sources"] = [*itertools.chain.from_iterable(moved)]
        if step.graphs is not None:
            entry["graphs"] = [_graph(graph, step, nodes, placed) for graph in step.graphs]
        if timing and step.kind is not None and step.outcome == "ran":
            entry["ms"] = round(step.seconds * 1e3, 2)
        packed.append(entry)
    data = {
        "title": title,
        "findings": list(findings),
        "lines": lines.things(),
        "sources": sources.things(),
        "nodes": nodes.things(),
        "abouts": abouts.things(),
        "steps": packed,
        "kernels": kernels,
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    page = _part("page.html")
    script = "\n".join(_part(f"page_{name}.js") for name in ("steps", "text", "graph", "kernels", "controls"))
    # The data must not contain the end of its element, or the begin of another one.
    parts = {
        "style": _phase_colours() + _part("page.css"),
        "script": script,
        "data": text.replace("<", "\\u003c"),
    }
    for name, part in parts.items():
        page = page.replace(f"@@{name}@@", part, 1)
    return page


def _phase_colours() -> str:
    """The colours of phases, the same in light and dark: variables for the style sheet."""
    named = {"forward": COLOURS["F"], "backward": COLOURS["B"], "unnamed": COLOURS[""]}
    return ":root { " + " ".join(f"--{name}: {colour};" for name, colour in named.items()) + " }\n"


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _runs(changes: Iterable[tuple[str, str]], lines: _NumberTable) -> list[list[Any]]:
    """Runs of lines with the same change: its sign, and how many lines, or the numbers of the new ones."""
    runs: list[list[Any]] = []
    for sign, run in itertools.groupby(changes, key=lambda change: change[0]):
        texts = [_shorten(text) for _, text in run]
        comes = sign in (NEW, CHANGED, MOVED_HERE)
        runs.append([sign, *map(lines.number, texts)] if comes else [sign, len(texts)])
    return runs


def _carried(changes: Iterable[tuple[str, str]], before: Sequence[int]) -> list[int]:
    """The number of the source of each line, as before; -1 for new lines."""
    old, after = iter(before), list[int]()
    for sign, _ in changes:
        if sign in (NEW, MOVED_HERE):
            after.append(-1)
            continue
        source = next(old)
        if sign in (KEPT, CHANGED):
            after.append(source)
    return after


def _shorten(line: str) -> str:
    more = len(line) - _MAX_LINE
    return line if more <= 0 else f"{line[:_MAX_LINE]} … and {more} more characters"


def _graph(graph: Graph, step: PassRun, nodes: _NumberTable, placed: dict[Hashable, str]) -> dict[str, Any]:
    """For each node its number in the table, its line, and how far back its sources are.

    `placed` are the passes after which a fragment was first on its mesh, by what it is.
    """
    fresh, places = step.fresh.get(graph.function, ()), step.places
    drawn = []
    for i, node in enumerate(graph.nodes):
        facts = node.facts
        if node.mesh and node.kind != "transfer":
            what = dict(facts).get("from") if node.kind == "unnamed" else node.label.split(", ")[0]
            by = placed.setdefault((node.mesh, node.kind == "unnamed", what), step.title.partition("{")[0])
            facts = (*facts, ("on this mesh since", by))
        look = (node.mesh, node.source_mesh, node.kind, node.label, node.short, facts)
        line = places[node.place] if node.place < len(places) else -1
        drawn.append([nodes.number(look), line, int(i in fresh), *(i - source for source in node.sources)])
    return {
        "name": graph.function,
        "meshes": graph.meshes,
        "nodes": drawn,
        "plain": graph.plain_ops,
        "left": graph.left_out,
    }


INPUT = "input"
Source = tuple[tuple[str, str], ...]


@functools.lru_cache(100_000)  # the same places come again after other passes
def source_of(location: str) -> Source:
    """The calls of the user's code in a location, innermost first, each with the text of its line."""
    return tuple((str(frame), frame.source) for frame in frames_of(location)[:_MAX_FRAMES])


@dataclasses.dataclass(frozen=True)
class PipelinePass:
    """A pass of a pipeline: the pass, its pipeline, and the reason for its position."""

    pass_: Pass
    phase: str = ""
    why: str = ""


@dataclasses.dataclass
class PassRun:
    """A pass that ran, or failed: its description, and the changes of the lines.

    Attributes:
        title: the pass with its options.
        phase: its pipeline.
        why: the reason for its position.
        kind: its class; None for the module as it was read.
        seconds: its time.
        lines: the change of each line, in order; None if nothing changed.
        graphs: the graphs to draw; None if they are unchanged.
        fresh: for each function the new nodes.
        places: the numbers of the lines of the nodes.
        sources: for each line of the text the calls of the user's code that led to it, innermost first: place
            and text.
        outcome: ran, failed or left (not reached).
    """

    title: str
    phase: str = ""
    why: str = ""
    kind: type[Pass] | None = None
    seconds: float = 0.0
    outcome: str = "ran"
    lines: list[tuple[str, str]] | None = None
    graphs: list[Graph] | None = None
    fresh: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    places: list[int] = dataclasses.field(default_factory=list)
    sources: list[Source] = dataclasses.field(default_factory=list)

    @property
    def about(self) -> str:
        if self.kind is None:
            return "The module as it was read."
        if issubclass(self.kind, MlirPass):
            return "A pass of MLIR, StableHLO or Shardy."
        return inspect.cleandoc(self.kind.__doc__ or "")


class PassRecorder:
    """Records the input and the module after each pass."""

    def __init__(self) -> None:
        self.steps: list[PassRun] = []
        self._waiting: list[PipelinePass] = []
        self._begin()

    def _begin(self) -> None:
        self._numbering, self._namer = Numbering(), Namer()
        self._tree: list[OpText] = []
        self._graphs: list[Graph] = []

    def start(self, module: ir.Module, planned: Iterable[PipelinePass] = (), title: str = INPUT) -> None:
        """A module before its passes; earlier plans are dropped."""
        self.finish()
        self._begin()
        self._waiting = list(planned)
        self.steps.append(self._look(module, PassRun(title)))

    def begins(self, module: ir.Module) -> None:
        self.start(module, title="traced")

    def phase_begins(self, phase: str, steps: Iterable[Step]) -> None:
        self._waiting += (PipelinePass(step.pass_, phase, step.why) for step in steps)

    def pass_ended(self, pass_: Pass, module: ir.Module, changed: bool, seconds: float) -> None:
        """The module after a pass."""
        known = next((i for i, p in enumerate(self._waiting) if p.pass_ is pass_), None)
        planned = PipelinePass(pass_)
        if known is not None:
            planned = self._waiting[known]
            del self._waiting[: known + 1]
        step = PassRun(str(pass_), planned.phase, planned.why, type(pass_), seconds)
        self.steps.append(self._look(module, step) if changed else step)

    def finish(self) -> None:
        """No more passes run: the first planned pass that did not run failed."""
        for i, p in enumerate(self._waiting):
            outcome = "left" if i else "failed"
            self.steps.append(PassRun(str(p.pass_), p.phase, p.why, type(p.pass_), outcome=outcome))
        self._waiting = []

    def _look(self, module: ir.Module, step: PassRun) -> PassRun:
        """Compares the module with the one before."""
        raw = ir.to_text(module)
        tree = read_tree(raw)
        self._numbering.number(tree)
        pair(self._tree, tree)
        self._namer.name(tree)
        step.lines = list(changes(self._tree, tree))
        step.sources = [source_of(location) for location in ir.line_locations(module)]
        graphs = graphs_of(module)
        if graphs != self._graphs:
            step.graphs = graphs
            step.fresh = fresh_nodes(self._graphs, graphs) if self._tree else {}
            step.places = [i for i, line in enumerate(raw.splitlines()) if DRAWN_LINE.match(line)]
        self._tree, self._graphs = tree, graphs
        return step

    def text(self) -> str:
        """The last module, with stable names."""
        return "\n".join(line for op in self._tree for line in op.lines()) + "\n"

    def page(
        self,
        title: str,
        findings: Sequence[str],
        timing: bool = False,
        kernels: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The page, which needs no other file; `findings` are shown above the steps.

        With `timing` it says how long passes took; without, equal runs give equal pages.
        """
        self.finish()
        return page_of(title, findings, self.steps, timing, dict(kernels))
