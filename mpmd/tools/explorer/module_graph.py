"""Fragments and transfers of the functions of a module, by mesh, for drawing."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mpmd import ir
from mpmd.scheduling.render import bytes_text
from mpmd.sharding.shardings import global_bytes
from mpmd.support.user_code import frames_of

MAX_NODES = 4000
_MAX_SOURCES = 6

Fact = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Node:
    """A node to draw.

    Attributes:
        mesh: its mesh, or the target of a transfer; empty for no mesh.
        kind: forward, backward, both, unnamed, named, call, or transfer.
        label: its name.
        short: its text in a small box.
        facts: its properties: pairs of a word and a text.
        sources: the nodes that it waits for, by number.
        place: its number among the ops of these kinds in the module's text.
        source_mesh: the source of a transfer.
    """

    mesh: str
    kind: str
    label: str
    short: str
    facts: tuple[Fact, ...]
    sources: tuple[int, ...]
    place: int
    source_mesh: str = ""


@dataclasses.dataclass(frozen=True)
class Graph:
    """The nodes of one function, in program order.  `left_out` counts nodes that are not drawn."""

    function: str
    meshes: tuple[str, ...]
    nodes: tuple[Node, ...]
    plain_ops: int
    left_out: int


_COMPUTES = (ir.Fragment, ir.FragmentCall, ir.Call, ir.NamedComputation, ir.For)
_DRAWN = (*_COMPUTES, ir.Transfer)
# The beginning of an op that may be drawn, in the text.
DRAWN_LINE = re.compile(
    r"^ *(?:%[\w$.:, %-]+ = )?mpmd\.(?:fragment|fragment_call|call|named_computation|for|transfer)\b"
)


def graphs_of(module: ir.Module) -> list[Graph]:
    """The functions that run on meshes and have something to draw, entry points first."""
    places = {op: i for i, op in enumerate(ir.walk(module, _DRAWN))}
    functions = [f for f in ir.funcs(module) if f.is_mpmd and not f.is_external]
    sizes = {f.symbol: sum(1 for _ in ir.walk(f)) - 2 for f in ir.funcs(module) if not f.is_external}
    graphs = [_graph(f, places, sizes) for f in sorted(functions, key=lambda f: not f.is_entry)]
    return [graph for graph in graphs if graph.nodes]


def _graph(f: ir.Func, places: dict[ir.Op, int], sizes: dict[str, int]) -> Graph:
    nodes: list[Node] = []
    behind: dict[ir.Op, tuple[int, ...]] = {}
    plain = left_out = 0
    for op in ir.ops(f):
        makers = dict.fromkeys(ir.producer(v) for v in ir.read_by(op))
        nodes_before = dict.fromkeys(n for m in makers if m is not None for n in behind.get(m, ()))
        # Of many, the latest: those that it waits for longest.
        sources = tuple(sorted(nodes_before)[-_MAX_SOURCES:])
        behind[op] = sources
        if not isinstance(op, _DRAWN):
            plain += not isinstance(op, (ir.Assign, ir.Unassign))
        elif len(nodes) < MAX_NODES:
            behind[op] = (len(nodes),)
            nodes.append(_node(op, sources, places[op], sizes))
        else:
            left_out += 1
    return Graph(f.symbol, tuple(f.topology), tuple(_with_reasons(nodes)), plain, left_out)


def _node(op: Any, sources: tuple[int, ...], place: int, sizes: dict[str, int]) -> Node:
    if isinstance(op, ir.Transfer):
        return _transfer(op, sources, place)
    traffic = [("takes", _bytes(op.operands)), ("gives", _bytes(op.results))]
    if isinstance(op, ir.Call):
        facts = [*_from(op), ("microbatch", str(op.call_counter)), ("ops", str(sizes.get(op.callee_name, 0)))]
        return _compute("", "call", f"@{op.callee_name}", op.call_counter, facts + traffic, sources, place)
    if isinstance(op, ir.For):
        facts = [*_from(op), ("iterations", str(op.trip_count)), ("ops", str(_size(op)))]
        return _compute("", "call", f"for {op.trip_count}", None, facts + traffic, sources, place)
    if isinstance(op, ir.NamedComputation):
        facts = [*_from(op), ("ops", str(_size(op)))]
        return _compute("", "named", str(op.named).replace('"', ""), None, facts + traffic, sources, place)
    return _fragment(op, sources, place, sizes, traffic)


def _fragment(
    op: Any, sources: tuple[int, ...], place: int, sizes: dict[str, int], traffic: list[Fact]
) -> Node:
    origins = [str(origin).replace('"', "") for origin in op.origins]
    facts = [("mesh", op.mesh), *_from(op)]
    if isinstance(op, ir.FragmentCall):
        facts.append(("calls", f"@{op.callee_name}"))
    facts.append(("origin", ", ".join(origins) or "none: inferred"))
    if op.stage is not None:
        facts.append(("stage", str(op.stage)))
    if op.call_counter is not None:
        facts.append(("microbatch", str(op.call_counter)))
    if isinstance(op, ir.Fragment) and op.inferred_by:
        facts.append(("made by", ", ".join(op.inferred_by)))
    marks = [mark for mark in ("split_keep_transferred", "split_drop_transferred") if getattr(op, mark)]
    if op.is_remat:
        marks.append("remat")
    if marks:
        facts.append(("marks", ", ".join(marks)))
    size = sizes.get(op.callee_name, 0) if isinstance(op, ir.FragmentCall) else _size(op)
    facts += [("ops", str(size)), *traffic]
    counts = {origin.transpose_count for origin in op.origins}
    kind = "unnamed" if not counts else "forward" if counts == {0} else "both" if 0 in counts else "backward"
    label = ", ".join(origins) or (op.callee_name if isinstance(op, ir.FragmentCall) else "unnamed")
    return _compute(op.mesh, kind, label, op.call_counter, facts, sources, place)


def _compute(
    mesh: str,
    kind: str,
    label: str,
    counter: int | None,
    facts: list[Fact],
    sources: tuple[int, ...],
    place: int,
) -> Node:
    short = "" if kind == "unnamed" else label if counter is None else str(counter)
    return Node(mesh, kind, label, short, tuple(facts), sources, place)


def _transfer(op: ir.Transfer, sources: tuple[int, ...], place: int) -> Node:
    source, target = op.tensor.type, op.result.type
    where = [f"{t.mesh}{' (host)' * t.on_host}" for t in (source, target)]
    shape = "x".join([*map(str, target.shape), str(target.element_type)])
    facts: list[Fact] = [*_from(op), ("value", shape), ("bytes", _bytes([op.result]))]
    if target.sharding is not None:
        facts.append(("sharding", str(target.sharding).removeprefix("#sdy.sharding")))
    label = " → ".join(where)
    return Node(target.mesh, "transfer", label, "", tuple(facts), sources, place, source.mesh)


def _with_reasons(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes, and why each fragment is on its mesh: its name, or what reads it or is read by it there."""
    readers = collections.defaultdict[int, list[Node]](list)
    for node in nodes:
        for source in node.sources:
            readers[source].append(node)
    for number, node in enumerate(nodes):
        if not node.mesh or node.kind not in ("forward", "backward", "both", "unnamed"):
            yield node
            continue
        names = list(dict.fromkeys(_TRANSPOSED.sub("", node.label).split(", ")))
        if node.kind != "unnamed":
            why = f"the assignment has {', '.join(names)} on {node.mesh}"
        elif reading := _labels(other for other in readers[number] if other.mesh == node.mesh):
            why = f"it has no name; read here by {reading}"
        elif made := _labels(nodes[source] for source in node.sources if nodes[source].mesh == node.mesh):
            why = f"it has no name; reads results of {made} here"
        else:
            why = "it has no name; arguments or results of the step are here"
        yield dataclasses.replace(node, facts=(node.facts[0], ("why here", why), *node.facts[1:]))


_TRANSPOSED = re.compile(r"\(\d+\)")
_MAX_LABELS = 3


def _labels(nodes: Iterable[Node]) -> str:
    """The names of some nodes, once each."""
    found = (name for node in nodes if node.kind != "transfer" for name in node.label.split(", "))
    names = list(dict.fromkeys(_TRANSPOSED.sub("", name) for name in found))
    more = [f"{len(names) - _MAX_LABELS} more"] if len(names) > _MAX_LABELS else []
    return ", ".join([*names[:_MAX_LABELS], *more])


_ARGUMENT = re.compile(r'loc\("([^"]+)"\)')


def _from(op: Any) -> list[Fact]:
    """The place in the user's code from which an op comes, and its text; or the argument that it moves."""
    frames = frames_of(op)[:1]
    if frames:
        return [("from", str(frames[0])), *([("code", frames[0].source)] if frames[0].source else [])]
    argument = _ARGUMENT.fullmatch(str(op.location))
    return [("from", f"the argument {argument[1]}")] if argument else []


def _size(op: Any) -> int:
    return len(ir.walk(op)) - 2


def _bytes(values: Iterable[Any]) -> str:
    sizes = [global_bytes(v.type) for v in values if hasattr(v.type, "shape")]
    return f"{bytes_text(sum(sizes))} in {len(sizes)} value{'s' * (len(sizes) != 1)}"


def fresh_nodes(before: list[Graph], after: list[Graph]) -> dict[str, set[int]]:
    """For each function the nodes that were not in its graph before."""
    by_function = {}
    old = {graph.function: graph for graph in before}
    for graph in after:
        last = old.get(graph.function)
        known = collections.Counter(_look(node) for node in (last.nodes if last else ()))
        fresh = set()
        for i, node in enumerate(graph.nodes):
            known[_look(node)] -= 1
            if known[_look(node)] < 0:
                fresh.add(i)
        by_function[graph.function] = fresh
    return by_function


def _look(node: Node) -> tuple[Any, ...]:
    return node.mesh, node.kind, node.label, node.short, node.source_mesh
