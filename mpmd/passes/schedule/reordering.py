"""Common part of scheduling passes: constraints on the order of fragments, and sorting."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd import ir
from mpmd.passes.fragments.control_edges import put_control_edges
from mpmd.passes.fragments.dependencies import Dependencies

Edges = Sequence[tuple[ir.Fragment, ir.Fragment]]


class Precedence:
    """A partial order: data flow, and edges that are added as long as they fit.

    Attributes:
        edges: the added edges, (before, after).
    """

    def __init__(self, f: ir.Func) -> None:
        self.edges: list[tuple[ir.Fragment, ir.Fragment]] = []
        self._dependencies = Dependencies(f)
        self._earlier = self._dependencies.reach()

    def add(self, before: ir.Fragment, after: ir.Fragment) -> list[ir.Op]:
        """Adds an edge, unless the order is known already.

        Returns:
            Nothing; or, if the opposite is known, the ops on a path from `after` to `before`.
        """
        place = self._dependencies.place
        i, j = place[before], place[after]
        if self._earlier[j] >> i & 1:
            return []
        if self._earlier[i] >> j & 1:
            return self._dependencies.path(after, before)
        self.edges.append((before, after))
        self._dependencies.needs[j].add(i)
        gained = self._earlier[i] | 1 << i
        for k, earlier in enumerate(self._earlier):
            if k == j or earlier >> j & 1:
                self._earlier[k] = earlier | gained
        return []


def apply_edges(f: ir.Func, edges: Edges, remove_control_dependencies: bool) -> None:
    """Sorts a function by data flow and `edges`, which it keeps as control edges by default."""
    order, _ = Dependencies(f, edges).stable_order()
    ir.reorder(f, order)
    put_control_edges(f, [] if remove_control_dependencies else edges)


def way(ops: Sequence[ir.Op]) -> str:
    """A path through the program, op by op."""
    return " -> ".join(map(describe, ops))


def describe(op: ir.Op) -> str:
    """A description of one op for the user."""
    if isinstance(op, ir.Transfer):
        return f'transfer from mesh "{op.tensor.type.mesh}" to "{op.result.type.mesh}"'
    if not isinstance(op, ir.Fragment):
        return str(op.operation.name)
    text = f"fragment {', '.join(map(str, op.origins))}" if op.is_user else "inferred fragment"
    text += f' on mesh "{op.mesh}"'
    if op.stage is not None:
        text += f", stage {op.stage}"
    if op.call_counter is not None:
        text += f", microbatch {op.call_counter}"
    return f"({text})"
