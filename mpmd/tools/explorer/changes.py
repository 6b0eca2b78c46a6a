"""Changes of a text, line by line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from mpmd.tools.explorer.text_tree import OpText, in_order

KEPT, GONE, NEW, CHANGED, MOVED_AWAY, MOVED_HERE = "=-+~<>"
Change = tuple[str, str]
"""The kind of change, and the line: the new one, or the old one if it was removed."""


def changes(before: Sequence[OpText], after: Sequence[OpText]) -> Iterator[Change]:
    """All lines of both texts, once each, in an order that respects both; `after` has partners.

    A changed line is one entry for two: the old one is the next old line.
    """
    place = {op: i for i, op in enumerate(before)}
    partners = {i: place[op.partner] for i, op in enumerate(after) if op.partner in place}
    moved = set(partners.values())
    stayed = dict(in_order(partners))
    moved -= set(stayed.values())
    old = 0
    for i, op in enumerate(after):
        if i in stayed:
            yield from _left(before[old : stayed[i]], range(old, stayed[i]), moved)
            old = stayed[i] + 1
            yield from _inside(before[old - 1], op)
        elif i in partners:
            known = set(before[partners[i]].lines())
            for line in op.lines():
                yield (MOVED_HERE if line in known else NEW), line
        else:
            yield from ((NEW, line) for line in op.lines())
    yield from _left(before[old:], range(old, len(before)), moved)


def _left(ops: Sequence[OpText], places: Sequence[int], moved: set[int]) -> Iterator[Change]:
    for op, i in zip(ops, places):
        yield from ((MOVED_AWAY if i in moved else GONE, line) for line in op.lines())


def _inside(before: OpText, after: OpText) -> Iterator[Change]:
    parts = itertools.zip_longest(before.named, after.named, before.inside, after.inside)
    for old, new, olds, news in parts:
        if old is None:
            yield NEW, new
        elif new is None:
            yield GONE, old
        else:
            yield (KEPT if old == new else CHANGED), new
        yield from changes(olds or (), news or ())
