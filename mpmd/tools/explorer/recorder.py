"""Records a run of passes, and writes it as a page."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mpmd import ir
from mpmd.partition.pipeline import Step
from mpmd.passes.bases import MlirPass
from mpmd.support.passes import Pass
from mpmd.tools.explorer.module_graph import DRAWN_LINE, Graph, fresh_nodes, graphs_of
from mpmd.tools.explorer.naming import Namer
from mpmd.tools.explorer.page import page_of
from mpmd.tools.explorer.text_tree import Numbering, OpText, changes, pair, read_tree

INPUT = "input"


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
