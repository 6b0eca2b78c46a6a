"""Records a run of passes, and writes it down as a page."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from mpmd import ir
from mpmd.passes.bases import MlirPass
from mpmd.support.passes import Pass
from mpmd.tools.explorer.changes import changes
from mpmd.tools.explorer.graph import DRAWN_LINE, Graph, fresh_nodes, graphs_of
from mpmd.tools.explorer.naming import Namer
from mpmd.tools.explorer.page import page_of
from mpmd.tools.explorer.text_tree import Numbering, OpText, pair, read_tree

INPUT = "input"


@dataclasses.dataclass(frozen=True)
class Planned:
    """A pass that is to run, the pipeline it belongs to, and the reason why it stands there."""

    pass_: Pass
    phase: str = ""
    why: str = ""


@dataclasses.dataclass
class PassRun:
    """A pass that ran, or could not: what to say about it, and what it did to the lines.

    Attributes:
        title: the pass with its options.
        phase: the pipeline that it stands in.
        why: why it stands there.
        kind: its class; None for the module as it was read.
        seconds: what it took.
        lines: what happened to which line, in order; None if nothing changed.
        graphs: what to draw; None if it is what it was.
        fresh: for each function the nodes that were not there before.
        places: the numbers of the lines of what can be drawn.
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

    @property
    def about(self) -> str:
        """The docstring of the pass."""
        if self.kind is None:
            return "The module as it was read."
        if issubclass(self.kind, MlirPass):
            return "A pass of MLIR, StableHLO or Shardy."
        return inspect.cleandoc(self.kind.__doc__ or "")


class PassRecorder:
    """Takes down the input and what each pass makes of it."""

    def __init__(self) -> None:
        self.steps: list[PassRun] = []
        self._waiting: list[Planned] = []
        self._begin()

    def _begin(self) -> None:
        self._numbering, self._namer = Numbering(), Namer()
        self._tree: list[OpText] = []
        self._graphs: list[Graph] = []

    def start(self, module: ir.Module, planned: Iterable[Planned] = (), title: str = INPUT) -> None:
        """A module before its passes; what was planned for another is over."""
        self.finish()
        self._begin()
        self._waiting = list(planned)
        self.steps.append(self._look(module, PassRun(title)))

    def plan(self, planned: Iterable[Planned]) -> None:
        """More passes that are to run."""
        self._waiting += planned

    def after(self, pass_: Pass, module: ir.Module, changed: bool, seconds: float) -> None:
        """The module after a pass."""
        known = next((i for i, p in enumerate(self._waiting) if p.pass_ is pass_), None)
        planned = Planned(pass_)
        if known is not None:
            planned = self._waiting[known]
            del self._waiting[: known + 1]
        step = PassRun(str(pass_), planned.phase, planned.why, type(pass_), seconds)
        self.steps.append(self._look(module, step) if changed else step)

    def finish(self) -> None:
        """No more passes run: the first that was planned and did not, failed."""
        for i, p in enumerate(self._waiting):
            outcome = "left" if i else "failed"
            self.steps.append(PassRun(str(p.pass_), p.phase, p.why, type(p.pass_), outcome=outcome))
        self._waiting = []

    def _look(self, module: ir.Module, step: PassRun) -> PassRun:
        """Compares the module with what it was."""
        raw = ir.to_text(module)
        tree = read_tree(raw)
        self._numbering.number(tree)
        pair(self._tree, tree)
        self._namer.name(tree)
        step.lines = list(changes(self._tree, tree))
        graphs = graphs_of(module)
        if graphs != self._graphs:
            step.graphs = graphs
            step.fresh = fresh_nodes(self._graphs, graphs) if self._tree else {}
            step.places = [i for i, line in enumerate(raw.splitlines()) if DRAWN_LINE.match(line)]
        self._tree, self._graphs = tree, graphs
        return step

    def text(self) -> str:
        """The last module, with names that last."""
        return "\n".join(line for op in self._tree for line in op.lines()) + "\n"

    def page(self, title: str, findings: Sequence[str], timing: bool = False) -> str:
        """The page, which needs no other file; `findings` are shown above the steps.

        With `timing` it says how long passes took; without, equal runs give equal pages.
        """
        self.finish()
        return page_of(title, findings, [_entry(step, timing) for step in self.steps])


def _entry(step: PassRun, timing: bool) -> dict[str, Any]:
    """A step for the page."""
    entry: dict[str, Any] = {
        "title": step.title,
        "phase": step.phase,
        "why": step.why,
        "about": step.about,
        "outcome": step.outcome,
        "lines": step.lines,
        "graphs": step.graphs,
        "fresh": step.fresh,
        "places": step.places,
    }
    if timing and step.kind is not None and step.outcome == "ran":
        entry["ms"] = round(step.seconds * 1e3, 2)
    return entry
