"""A page that steps through a run of passes: for each its text, what it changed, and a graph by mesh."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import json
from typing import Any

from mpmd import ir
from mpmd.passes.bases import MlirPass
from mpmd.support.passes import Pass
from mpmd.tools.explorer_page import PAGE

MAX_NODES = 600
_MAX_COMPARED = 4_000_000


@dataclasses.dataclass(frozen=True)
class Node:
    """Something to draw: an op on a mesh, or on none."""

    mesh: str
    label: str
    kind: str
    sources: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A module at one moment."""

    title: str
    about: str
    seconds: float
    changed: bool
    lines: list[str]
    meshes: list[str]
    nodes: list[Node]


class Recorder:
    """Takes a snapshot of the input and of the module after each pass."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def start(self, module: ir.Module) -> None:
        """The module as it was read."""
        self._take("input", "The module as it was read.", 0.0, False, module)

    def after(self, pass_: Pass, module: ir.Module, changed: bool, seconds: float) -> None:
        """The module after a pass."""
        about = "A pass of MLIR, StableHLO or Shardy."
        if not isinstance(pass_, MlirPass):
            about = (type(pass_).__doc__ or "").strip().partition("\n")[0]
        self._take(_short(str(pass_)), about, seconds, changed, module)

    def _take(self, title: str, about: str, seconds: float, changed: bool, module: ir.Module) -> None:
        last = self.snapshots[-1] if self.snapshots else None
        if last is not None and not changed and title != "input":
            again = dataclasses.replace(last, title=title, about=about, seconds=seconds, changed=False)
            self.snapshots.append(again)
            return
        meshes, nodes = graph_of(module)
        lines = ir.to_text(module).splitlines()
        self.snapshots.append(Snapshot(title, about, seconds, changed, lines, meshes, nodes))

    def page(self, findings: list[str]) -> str:
        """The page, which needs no other file; `findings` are shown above the steps."""
        data = {"findings": findings, **_packed(self.snapshots)}
        return PAGE.replace("/*DATA*/null", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))


def _short(title: str, most: int = 160) -> str:
    return title if len(title) <= most else title[: most - 1] + "…"


def graph_of(module: ir.Module) -> tuple[list[str], list[Node]]:
    """The meshes and what runs on them, in program order, of the entry point; at most `MAX_NODES` nodes."""
    functions = [f for f in ir.funcs(module) if f.is_mpmd and not f.is_external]
    entry = next((f for f in functions if f.is_entry), functions[0] if functions else None)
    if entry is None:
        return [], []
    nodes: list[Node] = []
    place: dict[ir.Op, int] = {}
    drawn = (ir.Fragment, ir.FragmentCall, ir.Transfer, ir.Call, ir.NamedComputation, ir.For)
    for op in ir.ops(entry, drawn)[:MAX_NODES]:
        makers = dict.fromkeys(ir.producer(v) for v in op.operands)
        sources = tuple(place[m] for m in makers if m is not None and m in place)
        place[op] = len(nodes)
        nodes.append(Node(*_look(op), sources))
    return [*entry.topology, ""], nodes


def _look(op: ir.Op) -> tuple[str, str, str]:
    """Mesh, label and kind of a node."""
    if isinstance(op, ir.Transfer):
        source, target = op.tensor.type, op.result.type
        return target.mesh, f"{source.mesh} → {target.mesh}{' (host)' * target.on_host}", "transfer"
    if isinstance(op, ir.Call):
        return "", f"call {op.callee_name}{_counter(op.call_counter)}", "call"
    if isinstance(op, ir.For):
        return "", f"for {op.trip_count}", "call"
    if isinstance(op, ir.NamedComputation):
        return "", str(op.named), "named"
    origins = op.origins
    name = op.callee_name if isinstance(op, ir.FragmentCall) else ", ".join(map(str, origins)) or "unnamed"
    counts = {o.transpose_count for o in origins}
    kind = "unnamed" if not counts else "forward" if counts == {0} else "backward"
    return op.mesh, name + _counter(op.call_counter), kind


def _counter(counter: int | None) -> str:
    return "" if counter is None else f" [{counter}]"


def _packed(snapshots: list[Snapshot]) -> dict[str, Any]:
    """Every line once; each step as numbers of lines, and runs of lines that are kept, gone and new."""
    number: dict[str, int] = {}
    coded = [[number.setdefault(line, len(number)) for line in s.lines] for s in snapshots]
    steps = []
    for i, s in enumerate(snapshots):
        last = snapshots[i - 1] if i and s.title != "input" else s
        before = coded[i - 1] if last is not s else coded[i]
        known = collections.Counter((n.mesh, n.label, n.kind) for n in last.nodes)
        nodes = []
        for n in s.nodes:
            known[n.mesh, n.label, n.kind] -= 1
            fresh = int(known[n.mesh, n.label, n.kind] < 0)
            nodes.append([s.meshes.index(n.mesh), n.label, n.kind, n.sources, fresh])
        steps.append(
            {
                "title": s.title,
                "about": s.about,
                "ms": round(s.seconds * 1e3, 2),
                "changed": s.changed,
                "lines": None if last is not s and last.lines is s.lines else coded[i],
                "runs": runs_between(before, coded[i]),
                "meshes": s.meshes,
                "nodes": nodes,
            }
        )
    return {"lines": list(number), "steps": steps}


def runs_between(before: list[int], after: list[int]) -> list[list[int]]:
    """How one list becomes another: `[0, n]` lines kept, `[-1, n]` gone, `[1, n]` new."""
    head = 0
    while head < min(len(before), len(after)) and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < min(len(before), len(after)) - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    runs = [[0, head]] if head else []
    # Comparing takes time that grows with the product; very long middles are shown as replaced whole.
    if len(old) * len(new) > _MAX_COMPARED:
        runs += [[-1, len(old)], [1, len(new)]]
    else:
        for tag, i, j, k, n in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if tag == "equal":
                runs.append([0, j - i])
            else:
                runs += [[-1, j - i]] if j > i else []
                runs += [[1, n - k]] if n > k else []
    return runs + ([[0, tail]] if tail else [])
