"""Fusion: groups of instructions that share a kernel, merged while the cost model says that it saves time.

Products take their epilogues first, then groups merge along the array that costs most to pass through memory,
then neighbours that read the same arrays.  Last, results that are cheaper to compute again than to keep are
repeated, such as forward epilogues in backward passes; on a device that has operations to spare, also through
functions such as tanh, and from values of rows, which are stored for that: the differences from a mean follow
from the array and the mean.  A function that no kernel reads is stored where two results that are read follow
from it: `1 + tanh(x)`, and the derivative.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.cost.kernel_work import plan_workload, product_workloads
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.planner.dots import DotPlan
from mpmd.compile.kernels.planner.elements import MOVEMENT
from mpmd.compile.kernels.planner.groups import GroupPlan
from mpmd.compile.kernels.planner.plan_cache import caching_plans
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel
from mpmd.compile.passes.fusion.grouping import FusionGroup, Grouping, outline
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.cost.device import HOST, Device
from mpmd.cost.roofline import combined, projected
from mpmd.support import diagnostics

CLEARLY = 1.05
"""Tolerated slowdown, below the error of the model, in return for fewer kernels or fewer values in memory."""


class Prices:
    """Prices of planned groups on a device.

    Args:
        device: a description and not a measurement, so that choices are the same everywhere.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: dict[tuple[HloInstruction, ...], float | None] = {}

    def of(
        self, members: Sequence[HloInstruction], planned: Callable[[], PlannedKernel | str]
    ) -> float | None:
        """Seconds of a group, None if the models do not price it.

        Args:
            members: what the group is cached by.
            planned: makes its kernel, or says why there is none; called for groups that are not known yet.
        """
        # Members identify a group only while nothing is repeated: repetition comes last, and is priced by
        # `whole`.
        key = tuple(members)
        if key not in self._known:
            self._known[key] = self._price(planned())
        return self._known[key]

    def _price(self, planned: PlannedKernel | str) -> float | None:
        if not isinstance(planned, GroupPlan):
            return None
        work = plan_workload(planned.plan)
        return projected(work, self.device).seconds

    def whole(self, planned: Sequence[PlannedKernel | str]) -> float | None:
        """Seconds of several kernels, products with their epilogues among them; None if one is not priced."""
        total = 0.0
        for kernel in planned:
            seconds = self._price(kernel)
            if isinstance(kernel, DotPlan):
                parts = [projected(work, self.device) for work in product_workloads(kernel.plan)]
                seconds = combined(parts, self.device).seconds
            if seconds is None:
                return None
            total += seconds
        return total

    def saved(self, value: HloInstruction, joining: int, others: int) -> float:
        """Seconds that are saved if everything that can join a value's producer does.

        Args:
            value: it is then not read, and not written either if nothing else reads it.
            joining: how many readers can join.
            others: how many cannot.
        """
        size = value.shape.byte_size
        # One read for each reader that joins; the write goes too if no other reader needs the array.
        accesses = joining + (others == 0)
        return accesses * size / self.device.bandwidth_for(size)


_MAX_OPERATIONS = 24
"""Maximum of operations of one repeated value: more would cost more than the memory that they save."""
_MIN_BYTES = 1024
"""Bytes: smaller values stay in the cache."""
_SMALL_PART = 8
"""A value that is so much smaller than a result is stored, and the result computed from it."""


def repeat_cheap_results(grouping: Grouping, prices: Prices) -> None:
    """Let groups compute cheap results of other groups again, where that moves less and takes no longer.

    Args:
        grouping: the groups, changed in place.
        prices: the cost model.
    """
    for group in grouping.groups():
        _store_sources(grouping, prices, group)
        # Last results first: they may follow from earlier ones, which are then kept as arrays.  `others` is
        # found anew each time, as a repetition removes a result.
        for result in reversed(grouping.results(group.members)):
            others = [r for r in grouping.results(group.members) if r is not result]
            if not others:
                break
            if result.shape.byte_size >= _MIN_BYTES and _saves(grouping, group, result, others):
                _try(grouping, prices, group, [result], others)


def _store_sources(grouping: Grouping, prices: Prices, group: FusionGroup) -> None:
    """Store a function such as tanh, where two results or more follow from it, instead of them."""
    results = grouping.results(group.members)
    for source in group.members:
        size = source.shape.byte_size
        if not _is_expensive(source) or source in results or size < _MIN_BYTES:
            continue
        kept = [source, *results]
        follow = {
            r: readers
            for r in results
            if r.shape.byte_size >= size
            and (readers := _reading_groups(grouping, group, r))
            and _cone(grouping, group, r, [k for k in kept if k is not r]) == [source]
        }
        # The source is written once, and read once by each reader of what follows from it.
        accesses = 1 + len({reader for readers in follow.values() for reader in readers})
        if accesses < sum(1 + len(readers) for readers in follow.values()):
            _try(grouping, prices, group, list(follow), [k for k in kept if k not in follow])
            return


def _saves(
    grouping: Grouping, group: FusionGroup, result: HloInstruction, kept: Sequence[HloInstruction]
) -> bool:
    """Whether reading the sources of a result costs less than writing and reading it.

    Args:
        grouping: the groups.
        group: the group of the result.
        result: the result.
        kept: the other results of the group.
    """
    cone = _cone(grouping, group, result, kept)
    readers = _reading_groups(grouping, group, result)
    if cone is None or not readers:
        return False
    # Without the result its write and one read per reader are saved; a reader pays for arrays it does not
    # read already.
    further = 0
    for reader in readers:
        known = set(grouping.arrays(reader))
        further += sum(a.shape.byte_size for a in cone if a not in known)
    return further < (1 + len(readers)) * result.shape.byte_size


def _reading_groups(grouping: Grouping, group: FusionGroup, result: HloInstruction) -> list[FusionGroup]:
    """The groups that read a result; none if it has a reader without a group."""
    if result is grouping.computation.root:
        return []
    readers: dict[FusionGroup, None] = {}
    for reader in grouping.readers(result):
        other = grouping.group_of.get(reader)
        if other is None or reader.opcode in MOVEMENT:
            return []
        if other is not group:
            readers[other] = None
    return list(readers)


def _cone(
    grouping: Grouping, group: FusionGroup, result: HloInstruction, kept: Sequence[HloInstruction]
) -> list[HloInstruction] | None:
    """The arrays from which a result follows by cheap elementwise work; None if it needs more."""
    arrays: dict[HloInstruction, None] = {}
    seen, waiting, operations = {result}, [result], 0
    while waiting:
        instruction = waiting.pop()
        if instruction.opcode not in MOVEMENT:
            operations += 1
            if not _is_cheap(grouping, instruction) or operations > _MAX_OPERATIONS:
                return None
        for operand in instruction.operands:
            if operand.opcode == "constant" and operand.shape.size == 1:
                continue
            inner = grouping.group_of.get(operand) is group or operand.opcode in MOVEMENT
            ends = operand in kept or _is_stored(grouping, operand, result)
            if ends or not inner or (operand.opcode in MOVEMENT and operand in grouping.group_of):
                arrays[operand] = None
            elif operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return list(arrays)


def _is_cheap(grouping: Grouping, instruction: HloInstruction) -> bool:
    """Whether a device computes an instruction again rather than that it moves an array."""
    operation = OPERATIONS.get(instruction.opcode)
    spared = grouping.limits.repeats_functions or operation is None or not operation.is_expensive
    return instruction.is_elementwise and spared


def _is_stored(grouping: Grouping, value: HloInstruction, result: HloInstruction) -> bool:
    """Whether a member becomes a result, so that another one can be computed from it."""
    small = value.shape.is_array and _SMALL_PART * value.shape.byte_size <= result.shape.byte_size
    member = value in grouping.group_of and value.opcode not in MOVEMENT
    return grouping.limits.repeats_functions and small and member


def _try(
    grouping: Grouping,
    prices: Prices,
    group: FusionGroup,
    results: Sequence[HloInstruction],
    kept: Sequence[HloInstruction],
) -> None:
    """Repeat results, unless some group is then no longer one kernel, or all together take longer."""
    cone = {m for result in results for m in _members_between(grouping, group, result, kept)}
    reading = [reader for result in results for reader in _reading_groups(grouping, group, result)]
    concerned = list(dict.fromkeys([group, *reading]))
    # Priced before anything changes: plans depend on `repeated`.
    before = prices.whole([grouping.plan(g.members) for g in concerned])
    # A trial: every group concerned is planned anew, and the repetition is undone unless all are kernels.
    added = cone - grouping.repeated
    grouping.repeat(added)
    planned = [grouping.plan(g.members) for g in concerned]
    if any(isinstance(plan, str) for plan in planned):
        grouping.keep(added)
        return
    after = prices.whole(planned)
    if before is not None and after is not None and after > CLEARLY * before:
        grouping.keep(added)
        diagnostics.notice(
            f"hlo-fusion: {', '.join(r.name for r in results)} is kept: with it kernels take "
            f"{before * 1e6:.1f} us, computing it again {after * 1e6:.1f} us"
        )


def _members_between(
    grouping: Grouping, group: FusionGroup, result: HloInstruction, kept: Sequence[HloInstruction]
) -> set[HloInstruction]:
    """A result and the members of its group in its cone, down to kept values."""
    members, waiting = {result}, [result]
    while waiting:
        for operand in waiting.pop().operands:
            mine = grouping.group_of.get(operand) is group
            movement = operand.opcode in MOVEMENT and operand not in grouping.group_of
            ends = operand in kept or operand in members or _is_stored(grouping, operand, result)
            if (mine or movement) and not ends:
                members.add(operand)
                waiting.append(operand)
    return {f for f in members if f in grouping.group_of}


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
            # Joining changes who the readers are, so that each success begins anew.
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
        waiting = sorted(grouping.arrays(group), key=grouping.position.__getitem__)
        while waiting:
            other = grouping.group_of.get(waiting.pop(0))
            group = grouping.group_of[dot]
            if other is None or other is group or other.product or other.reduces or other.updates:
                continue
            if any(m.shape.size != dot.shape.size or _is_expensive(m) for m in other.members):
                continue
            mine, read = {*group.members, *other.members}, grouping.arrays(other)
            if all(r in mine for m in other.members for r in grouping.readers(m)):
                if self._joined(group, other):
                    waiting += [array for array in read if array not in waiting]

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
            # Another kernel reads the product from memory anyway.  Where what follows is reduced along rows,
            # one iteration over rows computes it and reads both once, without storing it.
            computing = [r for r in read if r in grouping.group_of and r.opcode not in MOVEMENT]
            if computing and any(self._has_reduced_rows(m) for m in other.members):
                return False
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
            # Ties are decided by program order, so that equal programs get equal groups.  A saving depends on
            # the readers alone, which do not change when groups join.
            heapq.heapify(waiting)
            while waiting:
                *_, value, reader = heapq.heappop(waiting)
                # Looked up now: either side may have joined another group since it was queued.
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
            # Only neighbours in program order: of n readers n - 1 pairs are tried, not all of them.
            for a, b in itertools.pairwise(groups):
                # A group that joined an earlier pair is no longer the group of its first member.
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
        # One loop over one size is always a kernel and never slower than two: it needs no plan and no price.
        if _plain(members):
            return ""
        planned = grouping.plan(members)
        if isinstance(planned, str):
            return planned
        together, apart = self.prices.of(members, lambda: planned), self._apart(a, b)
        # Groups that the models do not price, such as products, join whenever they are one kernel.
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
        neighbours = [v for v in ways.get(waiting.pop(), ()) if v not in reached]
        reached.update(neighbours)
        waiting += neighbours
    return reached.issuperset(members)


def _moves(value: HloInstruction, inside: set[HloInstruction]) -> bool:
    """Whether a value is a member of the group that was moved."""
    while value.opcode in MOVEMENT and value.operands:
        value = value.operands[0]
        if value in inside:
            return True
    return False


class Fusion(HloPass):
    """Joins what one kernel can compute: each group of instructions becomes a fusion.

    e = exponential(x); s = reduce(e); ROOT q = divide(e, broadcast(s))  ->  ROOT f = fusion(x), kind=kInput

    Movement (broadcast, transpose, slice ...) is repeated wherever its result is read.  What computes is
    repeated only where that is cheaper than keeping it: a value that is needed outside of its group becomes
    one more result of it.  Reshapes become bitcasts: arrays are row-major, so they move nothing.  Matrix
    products take what follows them, then groups grow along the arrays between them, what saves most time
    first, then neighbours that read the same array join.  Two groups join only if the cost model says that
    they take no longer together; each pair that stays apart is a notice, with the reason.

    Requires: no `call`; layouts are row-major.
    Ensures: every group is one kernel, by the planner's own word.
    Cost: one trial plan per pair of groups that exchange an array.
    Source: multi-output fusion and stitching as in XLA's priority fusion and in TAO's memory-intensive
        fusions, with the planner as the judge of legality.

    Attributes:
        most: instructions in one group.
        device: what groups are priced for.
        narrow_products: a product is stored in its own type where all that follows only widens it: its
            readers widen it then, and the array is half as large.
    """

    most: int = 96
    device: Device = HOST
    narrow_products: bool = False

    @caching_plans()
    def rewrite(self, module: HloModule) -> bool:
        changed = False
        for computation in CallGraph(module).sequential():
            changed |= _reshapes_are_bitcasts(computation)
            grouping = Grouping(computation, self.device.limits)
            merge_groups(grouping, self.most, Prices(self.device), narrow_products=self.narrow_products)
            changed |= outline(grouping)
        return changed


def _reshapes_are_bitcasts(computation: HloComputation) -> bool:
    changed = False
    for instruction in computation:
        if instruction.opcode == "reshape":
            instruction.opcode, changed = "bitcast", True
            instruction.attributes = {}
    return changed
