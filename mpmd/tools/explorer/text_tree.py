"""The text of a module as a tree of ops, and the changes from one tree to the next, line by line.

MLIR numbers values anew each time it prints: one op more, and every line below it looks changed.  Here a
value keeps its name as long as the op that defines it is there, so that lines differ where ops do.  The
text stays valid MLIR.
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
        match = _RESULTS.match(lines[0])
        results = NAME.findall(match[1]) if match else []
        rest = [lines[0][match.end() :] if match else lines[0], *lines[1:]]
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
        match = _OP.search(head)
        return match[1] if match else head.split(" ", 1)[0]

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
    trees = []
    last = chain[-1][0] if chain else None
    while last is not None:
        trees.append((last, partners[last]))
        last = back[last]
    return trees[::-1]


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
        match = _STEM.match(wanted)
        stem = match[0] if match and match[0] != wanted else wanted + "_"
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
        by_op: dict[OpText, RegionNames] = {}
        self._name_ops(tree, {}, RegionNames(), by_op)
        self._names = by_op

    def _name_ops(
        self,
        ops: Sequence[OpText],
        known: dict[str, str],
        names: RegionNames,
        by_op: dict[OpText, RegionNames],
    ) -> None:
        for op in ops:
            inside_known, inside_names = known, names
            if op.is_isolated:
                inside_known, inside_names = {}, self._names_inside(op, None)
            elif any(op.inside):
                inside_names = self._names_inside(op, names)
            by_op[op] = inside_names
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
                self._name_ops(inside, inside_known, inside_names, by_op)

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
    names = dict(zip(op.names.results, before.results))
    new, old = op.names.arguments, before.arguments
    if len(new) == len(operands) and len(old) == len(before.operands):
        # Arguments correspond to operands, as in fragments: each is matched by its own.
        return names | _in_turn(
            [(name, operand) for (name, _), operand in zip(new, operands)],
            [(name, operand) for (name, _), operand in zip(old, before.operands)],
        )
    if len(new) == len(old):
        return names | {a: b for (a, _), (b, _) in zip(new, old)}
    return names | _in_turn(new, old)


def _in_turn(new: Iterable[tuple[str, str]], old: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each name with the first one left of the same kind."""
    waiting: dict[str, collections.deque[str]] = collections.defaultdict(collections.deque)
    for name, kind in old:
        waiting[kind].append(name)
    return {name: waiting[kind].popleft() for name, kind in new if waiting[kind]}
