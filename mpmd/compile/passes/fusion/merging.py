"""Merges groups: products with epilogues, then along arrays by the time saved, then neighbours."""

from __future__ import annotations

import functools
import heapq
import itertools

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.planner.elements import MOVEMENT
from mpmd.compile.passes.fusion.grouping import FusionGroup, Grouping
from mpmd.compile.passes.fusion.prices import CLEARLY, Prices
from mpmd.compile.passes.fusion.repeating import repeat_cheap_results
from mpmd.support import diagnostics


def merge_groups(grouping: Grouping, most: int, prices: Prices, *, narrow_products: bool = False) -> None:
    """Join groups until no two more should.

    Args:
        grouping: the groups, changed in place.
        most: members of one group.
        prices: the cost model.
        narrow_products: see `Fusion`.
    """
    merging = _Merging(grouping, most, prices, narrow_products)
    merging.epilogues()
    merging.along_arrays()
    merging.neighbours()
    merging.along_arrays()
    repeat_cheap_results(grouping, prices)


class _Merging:
    """The state of merging one computation."""

    def __init__(self, grouping: Grouping, most: int, prices: Prices, narrow_products: bool) -> None:
        self.narrow_products = narrow_products
        self.grouping = grouping
        self.most = most
        self.prices = prices

    # -- products
    def epilogues(self) -> None:
        """Let every product take the elementwise work after it, and the producers that only that reads."""
        for instruction in self.grouping.order:
            group = self.grouping.group_of.get(instruction)
            if group is not None and group.product is instruction:
                self._take_followers(group, instruction)
                self._take_feeders(self.grouping.group_of[instruction], instruction)

    def _take_followers(self, group: FusionGroup, dot: HloInstruction) -> None:
        grouping, grew = self.grouping, True
        while grew and len(group.members) < self.most:
            grew = False
            mine = set(group.members)
            readers = {r: None for m in group.members for r in grouping.readers(m) if r not in mine}
            for reader in sorted(readers, key=grouping.position.__getitem__):
                other = grouping.group_of.get(reader)
                if other is None or other is group or not self._may_follow(group, other, dot):
                    continue
                if self._joined(group, other):
                    group, grew = grouping.group_of[dot], True
                    break

    def _take_feeders(self, group: FusionGroup, dot: HloInstruction) -> None:
        """Join groups of the same size as the product's result that only its epilogue reads."""
        grouping = self.grouping
        for array in sorted(grouping.arrays(group), key=grouping.position.__getitem__):
            other = grouping.group_of.get(array)
            if other is None or other is group or other.product or other.reduces or other.updates:
                continue
            if any(m.shape.size != dot.shape.size or _is_expensive(m) for m in other.members):
                continue
            mine = {*grouping.group_of[dot].members, *other.members}
            if all(r in mine for m in other.members for r in grouping.readers(m)):
                self._joined(grouping.group_of[dot], other)

    def _may_follow(self, group: FusionGroup, other: FusionGroup, dot: HloInstruction) -> bool:
        """Whether another group may be part of a product's epilogue."""
        if other.reduces or other.updates:
            return False
        if any(m.shape.size != dot.shape.size for m in other.members):
            return False
        if self.narrow_products and all(_widens(m) for m in other.members):
            return False
        grouping, mine = self.grouping, {*group.members, *other.members}
        for member in group.members:
            read = [r for r in grouping.readers(member) if r not in mine]
            computing = [r for r in read if r in grouping.group_of and r.opcode not in MOVEMENT]
            if computing and any(self._has_reduced_rows(m) for m in other.members):
                return False  # an iteration over rows reads both once
        return True

    def _has_reduced_rows(self, member: HloInstruction) -> bool:
        last = member.shape.rank - 1
        return any(r.opcode == "reduce" and last in r.dimensions for r in self.grouping.readers(member))

    # -- arrays between groups
    def along_arrays(self) -> None:
        """Join producers with their readers, the largest saving first, until nothing changes."""
        grouping, changed = self.grouping, True
        while changed:
            changed = False
            waiting: list[tuple[float, int, int, HloInstruction, HloInstruction]] = []
            for value in (i for i in grouping.order if i in grouping.group_of):
                readers = grouping.readers(value)
                joining = [r for r in readers if r in grouping.group_of]
                saved = self.prices.saved(value, len(joining), len(readers) - len(joining))
                for reader in joining:
                    places = grouping.position[value], grouping.position[reader]
                    waiting.append((-saved, *places, value, reader))
            heapq.heapify(waiting)
            while waiting:
                *_, value, reader = heapq.heappop(waiting)
                producer, consumer = grouping.group_of[value], grouping.group_of[reader]
                if consumer is producer or not self._may_join(value, producer, consumer):
                    continue
                changed |= self._joined(producer, consumer)

    def _may_join(self, value: HloInstruction, producer: FusionGroup, consumer: FusionGroup) -> bool:
        """Whether two groups are of kinds that join along an array; costs are checked separately."""
        if producer.product or consumer.product or producer.updates:
            return False
        return not consumer.updates or len(self.grouping.readers(value)) == 1

    # -- neighbours
    def neighbours(self) -> None:
        """Join groups that read the same array, where neither needs the other."""
        grouping = self.grouping
        arrays = {a: None for g in grouping.groups() for a in grouping.arrays(g) if a.shape.is_array}
        for array in sorted(arrays, key=lambda a: (-a.shape.byte_size, grouping.position[a])):
            if array.shape.size < 1024:
                break
            readers = [grouping.group_of[r] for r in grouping.readers(array) if r in grouping.group_of]
            groups = [g for g in dict.fromkeys(readers) if not g.product and not g.updates]
            groups.sort(key=lambda g: grouping.position[g.members[0]])
            for a, b in itertools.pairwise(groups):
                if (
                    a is not b
                    and grouping.group_of[a.members[0]] is a
                    and grouping.group_of[b.members[0]] is b
                ):
                    self._joined(a, b)

    def _joined(self, a: FusionGroup, b: FusionGroup) -> bool:
        """Join two groups if they are one kernel that takes no longer; returns whether they were."""
        if a.was_refused(b):
            return False
        grouping = self.grouping
        members = sorted((*a.members, *b.members), key=grouping.position.__getitem__)
        reason = self._refusal(a, b, members)
        if reason:
            a.refuse(b)
            pair = f"{a.members[-1].name} and {b.members[-1].name}"
            diagnostics.notice(f"hlo-fusion: {pair} stay apart: {reason}")
            return False
        grouping.join(a, b)
        return True

    def _refusal(self, a: FusionGroup, b: FusionGroup, members: list[HloInstruction]) -> str:
        """Why two groups do not become one; empty if they do."""
        grouping = self.grouping
        if len(members) > self.most:
            return f"together they have {len(members)} instructions, more than {self.most}"
        if grouping.would_create_cycle(a, b):
            return "the inputs of one depend on the results of the other"
        if _plain(members):
            return ""
        planned = grouping.plan(members)
        if isinstance(planned, str):
            return planned
        together, apart = self.prices.of(members, lambda: planned), self._apart(a, b)
        if together is not None and apart is not None and together > CLEARLY * apart:
            return f"together they take {together * 1e6:.1f} us, apart {apart * 1e6:.1f} us"
        return ""

    def _apart(self, *groups: FusionGroup) -> float | None:
        """Seconds of groups as they are, None if the models do not price one of them."""
        total = 0.0
        for group in groups:
            price = self.prices.of(group.members, functools.partial(self.grouping.plan, group.members))
            if price is None:
                return None
            total += price
        return total


def _widens(member: HloInstruction) -> bool:
    """Whether a value is another one in a wider type."""
    return (
        member.opcode == "convert"
        and member.shape.info.kind == member.operands[0].shape.info.kind == "float"
        and member.shape.byte_size > member.operands[0].shape.byte_size
    )


def _is_expensive(member: HloInstruction) -> bool:
    operation = OPERATIONS.get(member.opcode)
    return operation is not None and operation.is_expensive


def _plain(members: list[HloInstruction]) -> bool:
    """Whether members are connected elementwise work on arrays of one size, without movement."""
    inside, dims = set(members), members[0].shape.dims
    if not all(m.is_elementwise and m.shape.dims == dims and m.opcode in OPERATIONS for m in members):
        return False
    if any(o.opcode in MOVEMENT and _moves(o, inside) for m in members for o in m.operands):
        return False
    return _hangs_together(members)


def _hangs_together(members: list[HloInstruction]) -> bool:
    """Whether there is a path from each member to each other one, over values of their size."""
    ways: dict[HloInstruction, list[HloInstruction]] = {}
    for member in members:
        for operand in member.operands:
            if operand.shape.dims == member.shape.dims:
                ways.setdefault(member, []).append(operand)
                ways.setdefault(operand, []).append(member)
    reached, waiting = {members[0]}, [members[0]]
    while waiting:
        found = [v for v in ways.get(waiting.pop(), ()) if v not in reached]
        reached.update(found)
        waiting += found
    return reached.issuperset(members)


def _moves(value: HloInstruction, inside: set[HloInstruction]) -> bool:
    """Whether a value is a member of the group that was moved."""
    while value.opcode in MOVEMENT and value.operands:
        value = value.operands[0]
        if value in inside:
            return True
    return False
