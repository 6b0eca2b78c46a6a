"""Names of values that are stable from pass to pass.

MLIR numbers values anew each time it prints: one op more, and every line below it looks changed.  Here a
value keeps its name as long as the op that defines it is there, so that lines differ where ops do.  The
text stays valid MLIR.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence

from mpmd.tools.explorer.text_tree import NAME, OpText, OwnNames

_STEM = re.compile(r"%[A-Za-z_$.-]*?(?=\d*$)")


class RegionNames:
    """The names used in one region, also by removed values; `around` are the enclosing region's names.

    A region may use the names of its siblings, but none of those around it.
    """

    def __init__(self, around: RegionNames | None = None) -> None:
        self.around = around
        self._taken: set[str] = set()
        self._inside: set[str] = set()
        self._next: dict[str, int] = collections.defaultdict(int)

    def take(self, name: str) -> str:
        """Takes a name, free or not."""
        self._taken.add(name)
        region = self.around
        while region is not None:
            region._inside.add(name)
            region = region.around
        return name

    def free(self, wanted: str) -> str:
        """Takes a name that was never used here: the wanted one, or one like it."""
        found = _STEM.match(wanted)
        stem = found[0] if found and found[0] != wanted else wanted + "_"
        while not self._is_free(wanted):
            wanted = f"{stem}{self._next[stem]}"
            self._next[stem] += 1
        return self.take(wanted)

    def _is_free(self, name: str) -> bool:
        region: RegionNames | None = self
        while region is not None:
            if name in region._taken:
                return False
            region = region.around
        return name not in self._inside


class Namer:
    """Names the values of each tree after the tree before."""

    def __init__(self) -> None:
        self._names: dict[OpText, RegionNames] = {}

    def name(self, tree: Sequence[OpText]) -> None:
        """Sets `named` of all ops; their partners have theirs.  Forgets the tree before."""
        found: dict[OpText, RegionNames] = {}
        self._name_ops(tree, {}, RegionNames(), found)
        self._names = found

    def _name_ops(
        self,
        ops: Sequence[OpText],
        known: dict[str, str],
        names: RegionNames,
        found: dict[OpText, RegionNames],
    ) -> None:
        for op in ops:
            inside_known, inside_names = known, names
            if op.is_isolated:
                inside_known, inside_names = {}, self._names_inside(op, None)
            elif any(op.inside):
                inside_names = self._names_inside(op, names)
            found[op] = inside_names
            results, arguments = op.names.results, [name for name, _ in op.names.arguments]
            operands = [known.get(name, name) for name in op.names.operands]
            kept = _names_of_partner(op, operands)
            chosen = {name: _taken(kept.get(name), name, names) for name in results}
            chosen |= {name: _taken(kept.get(name), name, inside_names) for name in arguments}
            op.named = [
                NAME.sub(lambda m, c=chosen, k=known: c.get(m[0]) or k.get(m[0], m[0]), line)  # type: ignore[misc]
                for line in op.raw
            ]
            op.lasting = OwnNames(
                [chosen[name] for name in results],
                [(chosen[name], kind) for name, kind in op.names.arguments],
                operands,
            )
            known.update((name, chosen[name]) for name in results)
            inside_known.update((name, chosen[name]) for name in arguments)
            for inside in op.inside:
                self._name_ops(inside, inside_known, inside_names, found)

    def _names_inside(self, op: OpText, around: RegionNames | None) -> RegionNames:
        """The names inside an op: its partner's, and those taken since."""
        names = self._names.get(op.partner) if op.partner else None
        if names is None or names.around is not around:
            return RegionNames(around)
        return names


def _taken(kept: str | None, wanted: str, names: RegionNames) -> str:
    return names.take(kept) if kept else names.free(wanted)


def _names_of_partner(op: OpText, operands: Sequence[str]) -> dict[str, str]:
    """For names that an op defines, the names of its partner for the same values."""
    if op.partner is None:
        return {}
    before = op.partner.lasting
    found = dict(zip(op.names.results, before.results))
    new, old = op.names.arguments, before.arguments
    if len(new) == len(operands) and len(old) == len(before.operands):
        # Arguments correspond to operands, as in fragments: each is matched by its own.
        return found | _in_turn(
            [(name, operand) for (name, _), operand in zip(new, operands)],
            [(name, operand) for (name, _), operand in zip(old, before.operands)],
        )
    if len(new) == len(old):
        return found | {a: b for (a, _), (b, _) in zip(new, old)}
    return found | _in_turn(new, old)


def _in_turn(new: Iterable[tuple[str, str]], old: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each name with the first one left of the same kind."""
    waiting: dict[str, collections.deque[str]] = collections.defaultdict(collections.deque)
    for name, kind in old:
        waiting[kind].append(name)
    return {name: waiting[kind].popleft() for name, kind in new if waiting[kind]}
