"""Puts recorded steps into the page, small: each line, text and node once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from mpmd.scheduling.render import COLOURS
from mpmd.tools.explorer.module_graph import Graph
from mpmd.tools.explorer.text_tree import CHANGED, MOVED_HERE, NEW

if TYPE_CHECKING:
    from mpmd.tools.explorer.recorder import PassRun

_MAX_LINE = 60_000


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
    lines, nodes, abouts = _NumberTable(), _NumberTable(), _NumberTable()
    packed = []
    for step in steps:
        texts = {"title": step.title, "phase": step.phase, "why": step.why, "outcome": step.outcome}
        entry: dict[str, Any] = {key: text for key, text in texts.items() if text}
        entry["about"] = abouts.number(step.about)
        if step.lines is not None:
            entry["lines"] = _runs(step.lines, lines)
        if step.graphs is not None:
            entry["graphs"] = [_graph(graph, step, nodes) for graph in step.graphs]
        if timing and step.kind is not None and step.outcome == "ran":
            entry["ms"] = round(step.seconds * 1e3, 2)
        packed.append(entry)
    data = {
        "title": title,
        "findings": list(findings),
        "lines": lines.things(),
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


def _shorten(line: str) -> str:
    more = len(line) - _MAX_LINE
    return line if more <= 0 else f"{line[:_MAX_LINE]} … and {more} more characters"


def _graph(graph: Graph, step: PassRun, nodes: _NumberTable) -> dict[str, Any]:
    """For each node its number in the table, its line, and how far back its sources are."""
    fresh, places = step.fresh.get(graph.function, ()), step.places
    drawn = []
    for i, node in enumerate(graph.nodes):
        look = (node.mesh, node.source_mesh, node.kind, node.label, node.short, node.facts)
        line = places[node.place] if node.place < len(places) else -1
        drawn.append([nodes.number(look), line, int(i in fresh), *(i - source for source in node.sources)])
    return {
        "name": graph.function,
        "meshes": graph.meshes,
        "nodes": drawn,
        "plain": graph.plain_ops,
        "left": graph.left_out,
    }
