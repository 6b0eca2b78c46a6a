"""Searching for groups: patterns that end at an instruction, then a plan of patterns that go together.

    for each group, producers first: the few best patterns that end there, grown over its producers' patterns
    for each cluster of patterns that overlap: a beam of selections without overlap
    from the cluster that gains most down: the best selection that makes no circle with what is taken
    again over the larger groups, until nothing gains

Source: the exploration of fusion patterns and plans as TAO does it (FusionStitching): top-k candidates by a
cost model that extend locally, and a beam of disjoint ones.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.fusion.grouping import FusionGroup, Grouping
from mpmd.compile.passes.fusion.prices import Prices

_KEPT = 3
"""Patterns that are kept for each group."""
_BEAM = 4
"""Selections that are followed in each cluster."""
_MAX_ROUNDS = 8

Node = FusionGroup | HloInstruction


@dataclass(frozen=True)
class Pattern:
    """Groups that one kernel computes.

    Attributes:
        mask: a bit for the number of each group.
        gain: seconds that it saves against its groups by themselves.
    """

    mask: int
    gain: float


@dataclass(frozen=True)
class _Selection:
    """Patterns without overlap.

    Attributes:
        mask: their groups.
        gain: seconds that they save together.
        patterns: which.
    """

    mask: int
    gain: float
    patterns: tuple[Pattern, ...]


def join_patterns(
    grouping: Grouping, most: int, multi_output: bool, prices: Prices, kept: int = _KEPT, beam: int = _BEAM
) -> None:
    """Join groups along arrays by the best plan that the search finds.

    Args:
        grouping: the groups, changed in place.
        most: members of one group.
        multi_output: groups may have several results.
        prices: what prices patterns.
        kept: patterns that are kept for each group.
        beam: selections that are followed in each cluster.
    """
    for _ in range(_MAX_ROUNDS):
        space = PatternSpace(grouping, most, multi_output, prices)
        patterns = space.patterns(kept)
        chosen = plan_patterns(space, patterns, beam)
        if not chosen:
            return
        for pattern in chosen:
            first, *others = [space.groups[k] for k in bits(pattern.mask)]
            for other in others:
                first = grouping.join(first, other)


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits of a mask that are set, smallest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class PatternSpace:
    """What a round searches in: groups, and how they feed each other.

    Attributes:
        groups: by number.
        above, below: for each node the nodes that it needs, and that need it, as masks.
    """

    def __init__(self, grouping: Grouping, most: int, multi_output: bool, prices: Prices) -> None:
        self.grouping, self.most, self.multi_output, self.prices = grouping, most, multi_output, prices
        self.groups = grouping.groups()
        apart = [i for i in grouping.order if i not in grouping.group_of]
        nodes: list[Node] = [*self.groups, *apart]
        self._number = {node: k for k, node in enumerate(nodes)}
        following = [sorted({self._number[n] for n in self._followers(node)}) for node in nodes]
        self.order = _topological(following)
        self.producers: list[list[int]] = [[] for _ in nodes]
        self.above, self.below = [0] * len(nodes), [0] * len(nodes)
        for k in self.order:
            for user in following[k]:
                self.above[user] |= self.above[k] | 1 << k
                self.producers[user].append(k)
        for k in reversed(self.order):
            for user in following[k]:
                self.below[k] |= self.below[user] | 1 << user
        self._seconds: dict[int, float | None] = {}

    def _followers(self, node: Node) -> Iterator[Node]:
        """The nodes that read a node, or run after it."""
        for member in node.members if isinstance(node, FusionGroup) else [node]:
            for user in (*self.grouping.readers(member), *member.control_successors):
                found: Node = self.grouping.group_of.get(user, user)
                if found is not node:
                    yield found

    # -- patterns
    def patterns(self, kept: int) -> list[Pattern]:
        """The best patterns that end at each group, all that save time."""
        best: dict[int, list[Pattern]] = {}
        for k in self.order:
            if k < len(self.groups) and self.seconds(1 << k) is not None:
                best[k] = self._ending_at(k, best, kept)
        found = {p.mask: p for patterns in best.values() for p in patterns if p.gain > 0}
        return sorted(found.values(), key=lambda p: (-p.gain, p.mask))

    def _ending_at(self, k: int, best: dict[int, list[Pattern]], kept: int) -> list[Pattern]:
        """The best patterns whose last group is `k`: grown over one producer after the other."""
        grown = [Pattern(1 << k, 0.0)]
        for producer in dict.fromkeys(self.producers[k]):
            masks = {p.mask | q.mask: p.gain + q.gain for p in grown for q in best.get(producer, ())}
            likely = sorted(masks, key=lambda mask: (-masks[mask], mask))[:kept]
            made = {p.mask: p for p in grown}
            for mask in likely:
                if mask not in made and (gain := self.gain(mask)) is not None:
                    made[mask] = Pattern(mask, gain)
            grown = sorted(made.values(), key=lambda p: (-p.gain, p.mask))[:kept]
        alone = Pattern(1 << k, 0.0)
        return grown if alone in grown else [*grown, alone]

    def gain(self, mask: int) -> float | None:
        """Seconds that groups save as one kernel; None if they are none."""
        together = self.seconds(mask)
        if together is None:
            return None
        return sum(self.seconds(1 << k) or 0.0 for k in bits(mask)) - together

    def seconds(self, mask: int) -> float | None:
        """What some groups take as one kernel; None if they are none."""
        if mask not in self._seconds:
            self._seconds[mask] = self._priced(mask)
        return self._seconds[mask]

    def _priced(self, mask: int) -> float | None:
        grouping, groups = self.grouping, [self.groups[k] for k in bits(mask)]
        if not is_convex(mask, self.above, self.below) or any(g.product or g.updates for g in groups):
            return None
        members = sorted((m for g in groups for m in g.members), key=grouping.position.__getitem__)
        if len(members) > self.most or (not self.multi_output and len(grouping.results(members)) > 1):
            return None
        return self.prices.of(members, functools.partial(grouping.plan, members))


def _topological(following: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of nodes, producers first; of those that may come next the smallest."""
    missing = [0] * len(following)
    for users in following:
        for user in users:
            missing[user] += 1
    ready = [k for k, count in enumerate(missing) if not count]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for user in following[order[-1]]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    return order


# -- plans
def plan_patterns(space: PatternSpace, patterns: Sequence[Pattern], beam: int) -> list[Pattern]:
    """Patterns without overlap that make no circle together."""
    taken: list[Pattern] = []
    reach = ContractedReach(space)
    clusters = [select_patterns(cluster, beam) for cluster in _clusters(patterns)]
    for selections in sorted(clusters, key=lambda found: (-found[0].gain, found[0].mask)):
        for selection in selections:
            if all(is_convex(p.mask, reach.above, reach.below) for p in selection.patterns):
                fitting = [p for p in selection.patterns if reach.take(p.mask)]
                taken += fitting
                break
    return taken


def _clusters(patterns: Sequence[Pattern]) -> list[list[Pattern]]:
    """Patterns that overlap, directly or through others; each cluster in their order."""
    found: list[tuple[int, list[Pattern]]] = []
    for pattern in patterns:
        mask, members, others = pattern.mask, [pattern], []
        for cluster in found:
            if cluster[0] & pattern.mask:
                mask |= cluster[0]
                members = [*cluster[1], *members]
            else:
                others.append(cluster)
        found = [*others, (mask, members)]
    order = {p.mask: k for k, p in enumerate(patterns)}
    return [sorted(members, key=lambda p: order[p.mask]) for _, members in found]


def select_patterns(patterns: Sequence[Pattern], beam: int) -> list[_Selection]:
    """The best selections of patterns that overlap, best first.

    Each pattern is taken or left out.  Selections are compared by what they have and what they may still
    get: for each group that is free, its part of the best pattern that comes later.
    """
    later: dict[int, list[float]] = {}
    for pattern in reversed(patterns):
        for k in bits(pattern.mask):
            parts = later.setdefault(k, [0.0])
            parts.append(max(parts[-1], pattern.gain / pattern.mask.bit_count()))
    followed = [_Selection(0, 0.0, ())]
    for pattern in patterns:
        for k in bits(pattern.mask):
            later[k].pop()
        taking = [
            _Selection(s.mask | pattern.mask, s.gain + pattern.gain, (*s.patterns, pattern))
            for s in followed
            if not s.mask & pattern.mask
        ]
        followed = [*taking, *followed]
        followed.sort(key=lambda s: -(s.gain - sum(later[k][-1] for k in bits(s.mask))))
        del followed[beam:]
    return sorted(followed, key=lambda s: (-s.gain, s.mask))


def is_convex(mask: int, above: Sequence[int], below: Sequence[int]) -> bool:
    """Whether nothing outside stands between two of some groups, given what is above and below of each."""
    over = under = 0
    for k in bits(mask):
        over |= above[k]
        under |= below[k]
    return not over & under & ~mask


class ContractedReach:
    """Reachability after some patterns became one node each."""

    def __init__(self, space: PatternSpace) -> None:
        self.above, self.below = list(space.above), list(space.below)

    def take(self, mask: int) -> bool:
        """Make one node of some groups; False if they would stand in a circle."""
        if not is_convex(mask, self.above, self.below):
            return False
        above = below = 0
        for k in bits(mask):
            above |= self.above[k]
            below |= self.below[k]
        above, below = above & ~mask, below & ~mask
        for k in bits(mask):
            self.above[k], self.below[k] = above | mask & ~(1 << k), below | mask & ~(1 << k)
        for k in bits(above):
            self.below[k] |= below | mask
        for k in bits(below):
            self.above[k] |= above | mask
        return True
