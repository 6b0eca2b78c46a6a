"""hlo-rematerialization."""

from __future__ import annotations

from mpmd.compile.analysis.cost import CostModel
from mpmd.compile.analysis.dataflow import HloValue
from mpmd.compile.analysis.liveness import in_place_pairs
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import Category
from mpmd.compile.schedule.heap import Heap, Simulation
from mpmd.compile.schedule.repeat import Repetition, repeat, trim
from mpmd.errors import PassError
from mpmd.support import diagnostics
from mpmd.support.passes import Pass

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
        found = [f"{v.instruction.name} ({self.heap.sizes[v]:,})" for v in alive[:5]]
        return ", ".join(found) or f"the computations that {order[at].name} calls"

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
        found: dict[HloValue, list[HloInstruction]] = {}
        for value in self.heap.traffic[instruction].defines:
            readers = self.heap.readers.get(value, [])
            if value in self.heap.kept[instruction.parent] or any(places[r] == at for r in readers):
                continue
            late = sorted((r for r in readers if places[r] > at), key=lambda r: places[r])
            if late:
                found[value] = late
        return found

    def _gain(self, instruction: HloInstruction, at: int, places: dict[HloInstruction, int]) -> int:
        """Bytes that are free at an instant if a later value is computed later."""
        if instruction in self.denied or not _can_repeat(instruction):
            return 0
        late = self._late(instruction, at, places)
        freed = sum(self.heap.sizes[v] for v in late)
        for value in self.heap.traffic[instruction].reads:
            readers = self.heap.readers.get(value, ())
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
