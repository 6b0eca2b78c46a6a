"""Values computed a second time, later in the schedule, rather than kept for their late readers.

It is for fragments that would not fit: memory at the peak is bought with time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mpmd.compile.analysis.dataflow import HloValue
from mpmd.compile.analysis.liveness import in_place_pairs
from mpmd.compile.cost.hlo_cost import CostModel
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import Category
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.kernels.planner import NoPlan, plan_instruction
from mpmd.compile.schedule.heap import Heap, Simulation
from mpmd.errors import PassError
from mpmd.support import diagnostics
from mpmd.support.passes import Pass

_FORWARDS = frozenset(("bitcast", "get-tuple-element"))


@dataclass
class Repetition:
    """A change, with the data to undo it.

    Attributes:
        copy: the second computation of the instruction.
        added: everything that was added, the copy first.
        redirected: (reader, number of an operand, the old operand).
        order: of the computation, before.
    """

    copy: HloInstruction
    added: list[HloInstruction] = field(default_factory=list)
    redirected: list[tuple[HloInstruction, int, HloInstruction]] = field(default_factory=list)
    order: list[HloInstruction] = field(default_factory=list)

    def undo(self) -> None:
        computation = self.copy.parent
        module = computation.module
        for reader, number, old in self.redirected:
            reader.replace_operand(number, old)
        for instruction in reversed(self.added):
            computation.remove(instruction)
        for body in self.copy.called:
            if not body.callers:
                module.remove_computation(body)
        computation.reorder(self.order)


def repeat(
    instruction: HloInstruction,
    order: Sequence[HloInstruction],
    late: Mapping[HloValue, Sequence[HloInstruction]],
) -> Repetition | None:
    """Compute results again before the first of their late readers, who read the copy from then on.

    Args:
        instruction: the instruction to compute again.
        order: of its computation.
        late: results with their late readers, in order.

    Returns:
        The change; None if a late reader gets a result in a way that cannot be redirected, or if no kernel
        computes the needed results of a fusion alone.
    """
    readers = {r: None for users in late.values() for r in users}
    if not readers or not _reachable(instruction, readers):
        return None
    computation = instruction.parent
    wanted = [v.index[0] for v in late if v.index]
    copy, renumbered = _copy(instruction, wanted)
    computation.add(copy)
    # A fusion with fewer results is another kernel, which the planner may refuse.
    if _loses_kernel(instruction, copy):
        _remove_unused(copy)
        return None
    done = Repetition(copy, [copy], [], list(order))
    copies: dict[HloInstruction, HloInstruction] = {instruction: copy}
    for reader in readers:
        for number, operand in enumerate(reader.operands):
            chain = _chain(operand, instruction)
            if chain and _is_wanted(chain, renumbered):
                for link in reversed(chain):
                    _extend(link, copies, renumbered, done)
                done.redirected.append((reader, number, operand))
                reader.replace_operand(number, copies[operand])
    # All copies go directly before the first late reader: as late as possible.
    first = min(order.index(r) for r in readers)
    computation.reorder([*order[:first], *done.added, *order[first:]])
    return done


def _reachable(instruction: HloInstruction, readers: Iterable[HloInstruction]) -> bool:
    """Whether late readers get the instruction's results directly, or through bitcasts and elements alone."""
    return all(any(_chain(o, instruction) for o in reader.operands) for reader in readers)


def _is_wanted(chain: Sequence[HloInstruction], renumbered: Mapping[int, int]) -> bool:
    """Whether a chain leads to a result that the copy has."""
    element = chain[-2] if len(chain) > 1 else chain[-1]
    return element.opcode != "get-tuple-element" or element.tuple_index in renumbered


def trim(instruction: HloInstruction) -> None:
    """Remove an unused instruction, or the unused results of a fusion."""
    computation = instruction.parent
    for user in list(instruction.users):
        _remove_unused(user)
    if not instruction.users:
        _remove_unused(instruction)
        return
    if instruction.opcode != "fusion" or not instruction.shape.is_tuple:
        return
    if any(u.opcode != "get-tuple-element" for u in instruction.users):
        return
    wanted = sorted({u.tuple_index for u in instruction.users})
    if len(wanted) == len(instruction.shape.elements):
        return
    order = list(computation)
    copy, renumbered = _copy(instruction, wanted)
    computation.add(copy)
    if _loses_kernel(instruction, copy):
        _remove_unused(copy)
        return
    for element in list(instruction.users):
        if copy.shape.is_tuple:
            element.replace_operand(0, copy)
            element.attributes["index"] = renumbered[element.tuple_index]
        else:
            element.replace_all_uses_with(copy)
            computation.remove(element)
            order.remove(element)
    order[order.index(instruction)] = copy
    _remove_unused(instruction)
    computation.reorder(order)


def _loses_kernel(whole: HloInstruction, part: HloInstruction) -> bool:
    """Whether a fusion has a kernel, and the rest of it has one, too."""
    fewer = part.opcode == "fusion" and part.shape is not whole.shape
    return fewer and _has_kernel(whole) and not _has_kernel(part)


def _has_kernel(fusion: HloInstruction) -> bool:
    try:
        plan_instruction("kernel", fusion)
    except NoPlan:
        return False
    return True


def _remove_unused(instruction: HloInstruction) -> None:
    """Remove an instruction, its bodies, and the chains of bitcasts and elements after it, if unused."""
    for user in list(instruction.users):
        if user.opcode in _FORWARDS:
            _remove_unused(user)
    computation = instruction.parent
    if instruction.users or instruction is computation.root:
        return
    computation.remove(instruction)
    for body in dict.fromkeys(instruction.called):
        if not body.callers:
            computation.module.remove_computation(body)


def _chain(operand: HloInstruction, source: HloInstruction) -> list[HloInstruction]:
    """The operand and the chain between it and a source, the source last; empty if there is none."""
    links = [operand]
    while links[-1] is not source:
        if links[-1].opcode not in _FORWARDS:
            return []
        links.append(links[-1].operands[0])
    return links


def _extend(
    link: HloInstruction,
    copies: dict[HloInstruction, HloInstruction],
    renumbered: Mapping[int, int],
    done: Repetition,
) -> None:
    """The same step from the copy as from the original."""
    if link in copies:
        return
    source = copies[link.operands[0]]
    if link.opcode == "get-tuple-element" and source is done.copy:
        if not source.shape.is_tuple:
            copies[link] = source
            return
        copy = HloInstruction(
            "get-tuple-element", link.shape, [source], {"index": renumbered[link.tuple_index]}
        )
    else:
        copy = link.clone([source])
    copies[link] = done.copy.parent.add(copy)
    done.added.append(copy)


def _copy(instruction: HloInstruction, wanted: Sequence[int]) -> tuple[HloInstruction, dict[int, int]]:
    """A copy of an instruction, of a fusion only with the wanted results; old number of a result → new."""
    same = {k: k for k in range(max(1, len(instruction.shape.elements)))}
    if instruction.opcode != "fusion":
        return instruction.clone(list(instruction.operands)), same
    body = instruction.to_apply.clone()
    results = sorted(set(wanted))
    if not instruction.shape.is_tuple or len(results) == len(instruction.shape.elements):
        copy = instruction.clone(list(instruction.operands))
        copy.set_called((body,))
        return copy, same
    elements = [body.root.operands[k] for k in results]
    tuple_ = body.root
    if len(elements) == 1:
        body.set_root(elements[0])
    else:
        body.set_root(body.add(HloInstruction("tuple", tuple_of([e.shape for e in elements]), elements)))
    body.remove(tuple_)
    operands = _trimmed(body, list(instruction.operands))
    copy = HloInstruction("fusion", body.root.shape, operands, dict(instruction.attributes), (body,))
    copy.copy_annotations(instruction)
    return copy, {old: new for new, old in enumerate(results)}


def _trimmed(body: HloComputation, operands: list[HloInstruction]) -> list[HloInstruction]:
    """Remove unused instructions from a body; returns the remaining operands."""
    for instruction in reversed(body.post_order()):
        if not instruction.users and instruction is not body.root and instruction.opcode != "parameter":
            body.remove(instruction)
    for number in reversed(range(len(operands))):
        parameter = body.parameters[number]
        if not parameter.users and parameter is not body.root:
            body.remove_parameter(number)
            del operands[number]
    return operands


_FLOPS, _BYTES = 1e11, 1e10  # cost of a repetition per second, to compare candidates
_MAX_TRIES = 400
_NEVER = {"parameter", "constant", "copy", "while", "conditional", "call", "custom-call"}


class Rematerialization(Pass):
    """Rematerialises values that are used late, until the simulated peak is under a limit.

    a = f(x); ... peak ...; r = g(a)  ->  a = f(x); ... peak ...; a2 = f(x); r = g(a2)

    Of the values that are live at the peak and read only before and after it, the one goes first that frees
    the most bytes for the least time; its operands must live longer, and count against it.  Of a fusion with
    several results only the needed ones are computed again.  A value without readers before the peak is not
    computed twice but moved.  Loops whose body holds the peak are handled inside.

    Requires: the module is scheduled.
    Ensures: the simulated peak is not above the limit, or a warning reports the excess and the values at the
        peak.
    Cost: one simulation per value that is tried.
    Source: XLA's rematerialisation; it considers bytes only, not the time of computing again.

    Attributes:
        limit: bytes of temporaries; 0 for no limit.
    """

    prefix = "hlo-"
    limit: int = 0

    def run(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff something is computed again.

        Raises:
            PassError: the module is not scheduled.
        """
        if not module.is_scheduled:
            raise PassError(f"{self.name} needs an order\n  run hlo-memory-schedule first")
        if self.limit <= 0:
            return False
        work = _Work(module)
        before, after = work.peak, work.reduce(module.entry, self.limit)
        if work.repeated:
            names = ", ".join(work.repeated[:5]) + (" ..." if len(work.repeated) > 5 else "")
            diagnostics.notice(
                f"{len(work.repeated)} values are computed again to save memory: {before:,} bytes of "
                f"temporaries became {after:,}, the limit is {self.limit:,} ({names})"
            )
        if after > self.limit:
            diagnostics.warning(
                f"temporaries need {after:,} bytes, and the limit is {self.limit:,}\n"
                f"  most of it is held by {work.holders()}\n"
                "  use smaller microbatches, more stages, or jax.checkpoint around what holds it"
            )
        return bool(work.repeated)


class _Work:
    """Rematerialisation of one module.

    Attributes:
        repeated: names of values that were computed again or moved.
    """

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.repeated: list[str] = []
        self.denied: set[HloInstruction] = set()
        self.tries = 0
        self._settle()

    def _settle(self) -> None:
        self.heap = Heap(self.module)
        for computation in self.heap.computations:
            self.heap.settle(computation, list(computation))

    @property
    def peak(self) -> int:
        return self.heap.inside[self.module.entry]

    def holders(self) -> str:
        order = list(self.module.entry)
        at = _peak_of(self.heap.simulate(order))
        values = [*self._alive(order, at), *self.heap.traffic[order[at]].defines]
        alive = sorted(
            (v for v in values if self.heap.sizes[v]), key=lambda v: (-self.heap.sizes[v], v.number)
        )
        largest = [f"{v.instruction.name} ({self.heap.sizes[v]:,})" for v in alive[:5]]
        return ", ".join(largest) or f"the computations that {order[at].name} calls"

    def reduce(self, computation: HloComputation, limit: int) -> int:
        """Lower the peak of a computation to a limit, as far as possible; returns the peak."""
        while True:
            simulation = self.heap.simulate(list(computation))
            if simulation.peak <= limit or self.tries >= _MAX_TRIES:
                return simulation.peak
            if self._repeat_one(computation, simulation):
                continue
            order = list(computation)
            at = _peak_of(simulation)
            callees = self.heap.traffic[order[at]].callees
            inside = max(callees, key=lambda c: self.heap.inside[c], default=None)
            # Nothing here can be freed.  If a loop's body holds the peak, the missing bytes are saved inside.
            if inside is None or self.heap.inside[inside] == 0:
                return simulation.peak
            held = self.heap.inside[inside]
            self.reduce(inside, held - (simulation.peak - limit))
            if self.heap.inside[inside] >= held:
                return simulation.peak

    def _repeat_one(self, computation: HloComputation, simulation: Simulation) -> bool:
        """Compute one value again, if that lowers the need of the computation."""
        order = list(computation)
        at = _peak_of(simulation)
        places = {instruction: place for place, instruction in enumerate(order)}
        candidates = [
            # Bytes per second of repeated work; of equals the earliest, which is held longest.
            (gain / self._seconds(instruction), -places[instruction], instruction)
            for instruction in dict.fromkeys(v.instruction for v in self._alive(order, at))
            if (gain := self._gain(instruction, at, places)) > 0
        ]
        for _, _, instruction in sorted(candidates, key=lambda c: c[:2], reverse=True):
            if self.tries >= _MAX_TRIES:
                return False
            self.tries += 1
            done = repeat(instruction, order, self._late(instruction, at, places))
            if done is None:
                self.denied.add(instruction)
                continue
            self._settle()
            # Gains are estimates: the copy's operands may live longer, and other values be at the new peak.
            # The simulation of the changed program decides; the score falls with each step, so this ends.
            if self.heap.simulate(list(computation)).score < simulation.score:
                self._accept(instruction, done)
                return True
            done.undo()
            self.denied.add(instruction)
            self._settle()
        return False

    def _accept(self, instruction: HloInstruction, done: Repetition) -> None:
        self.repeated.append(instruction.name)
        trim(instruction)
        if instruction.computation is None:
            self.denied.add(done.copy)  # it was moved; once is enough
        self._settle()

    def _alive(self, order: list[HloInstruction], at: int) -> list[HloValue]:
        """Values that are in use at an instant, and were computed before it."""
        after = set(order[at:])
        kept = self.heap.kept[order[0].parent]
        return [
            value
            for instruction in order[:at]
            for value in self.heap.traffic[instruction].defines
            if self.heap.sizes[value]
            and (value in kept or any(r in after for r in self.heap.readers.get(value, ())))
        ]

    def _late(
        self, instruction: HloInstruction, at: int, places: dict[HloInstruction, int]
    ) -> dict[HloValue, list[HloInstruction]]:
        """Results that are needed after an instant and not at it, with their late readers."""
        late_readers: dict[HloValue, list[HloInstruction]] = {}
        for value in self.heap.traffic[instruction].defines:
            readers = self.heap.readers.get(value, [])
            # Needed at the peak itself, or until the end: computing it again would free nothing there.
            if value in self.heap.kept[instruction.parent] or any(places[r] == at for r in readers):
                continue
            late = sorted((r for r in readers if places[r] > at), key=lambda r: places[r])
            if late:
                late_readers[value] = late
        return late_readers

    def _gain(self, instruction: HloInstruction, at: int, places: dict[HloInstruction, int]) -> int:
        """Bytes that are free at an instant if a later value is computed later."""
        if instruction in self.denied or not _can_repeat(instruction):
            return 0
        late = self._late(instruction, at, places)
        freed = sum(self.heap.sizes[v] for v in late)
        for value in self.heap.traffic[instruction].reads:
            readers = self.heap.readers.get(value, ())
            # An operand that would be dead at the peak must now live until the copy, and takes back its
            # bytes.
            ends = max((places[r] for r in readers if r in places), default=at)
            if ends < at and value not in self.heap.kept[instruction.parent]:
                freed -= self.heap.sizes[value]
        return freed

    def _seconds(self, instruction: HloInstruction) -> float:
        cost = CostModel().instruction(instruction)
        return cost.flops / _FLOPS + cost.bytes / _BYTES + 1e-9


def _can_repeat(instruction: HloInstruction) -> bool:
    """Whether computing an instruction twice gives the same result, without side effects."""
    if instruction.opcode in _NEVER or instruction.has_side_effect or in_place_pairs(instruction):
        return False
    if instruction.info.category in (Category.COLLECTIVE, Category.ASYNC):
        return False
    return not instruction.has_control_edges


def _peak_of(simulation: Simulation) -> int:
    return simulation.profile.index(simulation.peak)
