"""The text of a module as a tree of ops, and the pairs of corresponding ops of two trees.

Changes of a text, line by line.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

NAME = re.compile(r"%[\w$.-]+")
_ARGUMENT = re.compile(r"%[\w$.-]+(?=: | = )")
_END_OF_TYPE = re.compile(r", %|\) ")
_RESULTS = re.compile(r"\s*(%[\w$.:, %-]+) = ")
_OP = re.compile(r'(?:^|= )"?([a-z_]+\.[\w.]+)')
_FRAGMENT = re.compile(r'mpmd\.fragment(?:_call)?<mesh="([^"]*)", origin=\[([^\]]*)\]')
_NAMED = re.compile(r"mpmd\.named_computation<(.*?)> \(")
_COUNTER = re.compile(r"call_counter = (\d+)")
_SYMBOL = re.compile(r'@("[^"]*"|[\w.$-]+)')
_ISOLATED = ("func.func", "module")
_BETWEEN = ("mpmd.transfer", "mpmd.assign", "mpmd.unassign")


@dataclasses.dataclass
class OwnNames:
    """The names in an op's own lines.

    Attributes:
        results: names of its results.
        arguments: name and type of the arguments of its regions.
        operands: names that it uses.
    """

    results: list[str]
    arguments: list[tuple[str, str]]
    operands: list[str]

    @staticmethod
    @functools.lru_cache(100_000)  # the same lines come again in other microbatches, and after other passes
    def of(*lines: str) -> OwnNames:
        found = _RESULTS.match(lines[0])
        results = NAME.findall(found[1]) if found else []
        rest = [lines[0][found.end() :] if found else lines[0], *lines[1:]]
        arguments = [
            (m[0], _END_OF_TYPE.split(line[m.end() :], maxsplit=1)[0])
            for line in rest
            for m in _ARGUMENT.finditer(line)
        ]
        defined = {name for name, _ in arguments}
        operands = [name for line in rest for name in NAME.findall(line) if name not in defined]
        return OwnNames(results, arguments, operands)


@dataclasses.dataclass(eq=False)
class OpText:
    """One op: its own lines (head, what separates its regions, end), and the ops after each of them.

    Attributes:
        raw: its own lines as MLIR prints them.
        inside: `inside[i]` are the ops between `raw[i]` and `raw[i + 1]`.
        named: its own lines with stable names; see `naming`.
        lasting: the names in them.
        value: equal for two ops that compute the same from the same arguments.
        identity: equal for two ops that are the same op, changed or not; None if unknown.
        partner: the corresponding op of the tree before.
    """

    raw: list[str]
    inside: list[list[OpText]] = dataclasses.field(default_factory=lambda: [[]])
    named: list[str] = dataclasses.field(default_factory=list)
    lasting: OwnNames = dataclasses.field(default_factory=lambda: OwnNames([], [], []))
    value: int = 0
    identity: Hashable = None
    partner: OpText | None = None

    @functools.cached_property
    def names(self) -> OwnNames:
        return OwnNames.of(*self.raw)

    @functools.cached_property
    def kind(self) -> str:
        """Name of the op, or its first word."""
        head = self.raw[0].strip()
        found = _OP.search(head)
        return found[1] if found else head.split(" ", 1)[0]

    @property
    def is_isolated(self) -> bool:
        """Whether its regions have names of their own."""
        return self.kind in _ISOLATED

    @functools.cached_property
    def template(self) -> str:
        """All its text without the names."""
        own = NAME.sub("%", "\n".join(self.raw))
        return "\n".join([own, *(op.template for ops in self.inside for op in ops)])

    def lines(self) -> Iterable[str]:
        for line, ops in zip(self.named, self.inside):
            yield line
            for op in ops:
                yield from op.lines()


def read_tree(text: str) -> list[OpText]:
    top = OpText([""])
    open_ops: list[tuple[int, OpText]] = [(-1, top)]
    for line in text.splitlines():
        words = line.lstrip(" ")
        indent = len(line) - len(words)
        while open_ops[-1][0] > indent:
            open_ops.pop()
        if open_ops[-1][0] == indent:
            if words[:1] in ("}", "^"):
                open_ops[-1][1].raw.append(line)
                open_ops[-1][1].inside.append([])
                continue
            open_ops.pop()
        op = OpText([line])
        open_ops[-1][1].inside[-1].append(op)
        open_ops.append((indent, op))
    return top.inside[0]


class Numbering:
    """Numbers for values and what computes them, the same in every module of a run."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def number(self, ops: Iterable[OpText], known: dict[str, tuple[int, Hashable]] | None = None) -> None:
        """Sets `value` and `identity` of all ops; `known` has number and identity of the names around."""
        known = {} if known is None else known
        for op in ops:
            used = [known.get(name, (-1, None)) for name in op.names.operands]
            op.value = self.of((op.template, tuple(number for number, _ in used)))
            op.identity = _identity(op, used)
            around = {} if op.is_isolated else known
            for i, name in enumerate(op.names.results):
                known[name] = (self.of((op.value, i)), (op.identity, i))
            for i, (name, _) in enumerate(op.names.arguments):
                around[name] = (self.of(("argument", i)), i)
            for inside in op.inside:
                self.number(inside, around)


def _identity(op: OpText, used: Sequence[tuple[int, Hashable]]) -> Hashable:
    head, kind = op.raw[0], op.kind
    counter = _COUNTER.search(head)
    fragment = _FRAGMENT.search(head)
    if fragment:
        return "fragment", fragment[2] or fragment[1], counter and counter[1]
    named = _NAMED.search(head)
    if named:
        return "fragment", named[1], counter and counter[1]
    if kind in ("func.func", "mpmd.call"):
        symbol = _SYMBOL.search(head)
        return kind, symbol and symbol[1], counter and counter[1]
    if kind in _BETWEEN:
        return kind, head.rpartition(" -> ")[2], used[0][1] if used else None
    return kind if kind == "module" else None


def pair(before: Sequence[OpText], after: Sequence[OpText]) -> None:
    """Sets the partners of the ops in `after`, and of all inside them, among those in `before`.

    First those that compute the same, then those with the same identity, then those with the same text,
    at last ops of one kind between the same partners.
    """
    partners: dict[int, int] = {}
    levels: list[tuple[Callable[[OpText], Hashable], bool]] = [
        (lambda op: op.value, True),
        (lambda op: op.identity, True),
        (lambda op: op.template, False),
        (lambda op: op.kind, False),
    ]
    for key, anywhere in levels:
        _pair_by(key, before, after, partners, anywhere)
    for new, old in partners.items():
        after[new].partner = before[old]
        for olds, news in zip(before[old].inside, after[new].inside):
            if olds and news:
                pair(olds, news)


def _pair_by(
    key: Callable[[OpText], Hashable],
    before: Sequence[OpText],
    after: Sequence[OpText],
    partners: dict[int, int],
    anywhere: bool,
) -> None:
    """Adds partners with equal keys: the only ones of their key, those between partners, then the rest."""
    taken = set(partners.values())
    olds = {i: k for i, op in enumerate(before) if i not in taken and (k := key(op)) is not None}
    news = {i: k for i, op in enumerate(after) if i not in partners and (k := key(op)) is not None}
    if not olds or not news:
        return
    count_old, count_new = collections.Counter(olds.values()), collections.Counter(news.values())
    place = {k: i for i, k in olds.items() if count_old[k] == 1}
    if anywhere:
        for i, k in news.items():
            if count_new[k] == 1 and k in place:
                partners[i] = place[k]
                del olds[place[k]]
    news = {i: k for i, k in news.items() if i not in partners}
    kept = in_order(partners)
    ends = [old for _, old in kept]
    starts = [new for new, _ in kept]
    # Old ops by the gap between partners, so that equal ones pair with their neighbours.
    waiting: dict[Hashable, collections.deque[int]] = collections.defaultdict(collections.deque)
    for i, k in olds.items():
        waiting[bisect.bisect(ends, i), k].append(i)
    for i, k in list(news.items()):
        queue = waiting.get((bisect.bisect(starts, i), k))
        if queue:
            partners[i] = queue.popleft()
            del olds[partners[i]], news[i]
    if anywhere:
        rest: dict[Hashable, collections.deque[int]] = collections.defaultdict(collections.deque)
        for i, k in olds.items():
            rest[k].append(i)
        for i, k in news.items():
            if rest[k]:
                partners[i] = rest[k].popleft()


def in_order(partners: dict[int, int]) -> list[tuple[int, int]]:
    """The longest list of pairs (new, old) in which both grow: the ops that kept their order.

    Source: the longest increasing subsequence by patience sorting (Fredman, 1975).
    """
    tails: list[int] = []
    chain: list[tuple[int, int]] = []
    back: dict[int, int | None] = {}
    for new in sorted(partners):
        old = partners[new]
        at = bisect.bisect_left(tails, old)
        back[new] = chain[at - 1][0] if at else None
        tails[at : at + 1] = [old]
        chain[at : at + 1] = [(new, old)]
    found = []
    last = chain[-1][0] if chain else None
    while last is not None:
        found.append((last, partners[last]))
        last = back[last]
    return found[::-1]


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
